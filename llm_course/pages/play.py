"""A control that the reader moves, beside a picture for those who only read."""

import asyncio
import contextlib
import functools
import inspect
import io
import threading
import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from IPython import get_ipython
from IPython.display import display


def play(draw: Callable[..., Any], *, live: bool = True, **controls: Any) -> None:
    """Show what `draw` shows, and a control for each of its arguments.

    `draw` plots, prints or displays. It is called once without arguments, so each has a default,
    with which its control begins; and again whenever the reader moves a control. `controls` are
    those of `ipywidgets.interact`: `(low, high, step)` makes a slider, a list a menu, a text a
    text field, a bool a checkbox; a widget is taken as it is. With `live=False` a slider waits
    until it is released, for a `draw` that takes longer than a blink. If `draw` raises for what the
    reader chose, its error is shown in the picture's place, and the next choice draws again.

    The first picture is part of the same output as the controls. It is all that a stored page
    keeps, and all that is shown where `ipywidgets` isn't installed.
    """
    picture = _shown_by(draw)
    static = {kind: value for output in picture[::-1] for kind, value in output["data"].items()}
    try:
        from ipywidgets import Output, VBox, interactive
    except ImportError:
        display(static, raw=True)
        return
    inputs = {}
    for name, argument in inspect.signature(draw).parameters.items():
        default = argument.default
        control = interactive.widget_from_abbrev(controls.get(name, default), default)
        control.description = control.description or name
        control.value = default
        inputs[name] = control
    screen = Output(outputs=picture)
    drawn = {name: _value_of(control) for name, control in inputs.items()}

    def redraw() -> None:
        nonlocal drawn
        chosen = {name: _value_of(control) for name, control in inputs.items()}
        if chosen == drawn:
            return
        drawn = chosen
        try:
            screen.outputs = _shown_by(functools.partial(draw, **chosen))
        except Exception as error:
            screen.outputs = (_error_of(error),)

    redraw_in_turn = _in_turn(redraw)
    for control in inputs.values():
        if not live and control.has_trait("continuous_update"):
            control.continuous_update = False
        control.observe(redraw_in_turn, "value")
    box = VBox([*inputs.values(), screen])
    display(box._repr_mimebundle_() | static, raw=True)


def _value_of(control: Any) -> Any:
    """The value of a control, without what a slider's arithmetic adds: it sends 30.000000000000004
    for 30, as soon as it is shown.
    """
    value = control.value
    return float(f"{value:.12g}") if isinstance(value, float) else value


def _in_turn(function: Callable[[], None]) -> Callable[[Any], None]:
    """A callback for a control that calls `function` in the thread of the cells, and waits for it.

    JupyterLab may have a second thread of the kernel answer the controls. But the output of a
    process is captured for all of its threads, and pyplot's figures are theirs together: two
    pictures drawn at a time would take each other's parts.
    """
    try:
        loop = asyncio.get_running_loop()  # the kernel's
    except RuntimeError:  # there is no kernel
        return lambda _: function()
    home = threading.current_thread()

    async def turn() -> None:
        function()

    def call(_: Any) -> None:
        if threading.current_thread() is home:
            function()
        else:
            asyncio.run_coroutine_threadsafe(turn(), loop).result()

    return call


def _shown_by(draw: Callable[[], Any]) -> tuple[dict[str, Any], ...]:
    """What a call prints, plots and displays, as a notebook stores it.

    IPython's `capture_output` puts another publisher in the shell's place, and a message to the
    kernel that comes meanwhile is lost. So this one keeps the publisher, and what it would publish.
    """
    shown: list[tuple[Any, Any]] = []

    def keep(data: Any, metadata: Any = None, **_: Any) -> None:
        shown.append((data, metadata or {}))

    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if shell := get_ipython():
            stack.enter_context(patch.object(shell.display_pub, "publish", keep))
        draw()
    if printed.getvalue():
        shown.insert(0, ({"text/plain": printed.getvalue()}, {}))
    return tuple(
        {"output_type": "display_data", "data": data, "metadata": metadata}
        for data, metadata in shown
    )


def _error_of(error: Exception) -> dict[str, Any]:
    """An error as a notebook stores it, in its last line alone."""
    line = "".join(traceback.format_exception_only(error)).rstrip()
    name = type(error).__name__
    return {"output_type": "error", "ename": name, "evalue": str(error), "traceback": [line]}
