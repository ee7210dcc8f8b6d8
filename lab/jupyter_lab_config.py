"""How `make lab` opens JupyterLab for a student: the contents page, and labextensions/llm-course.

Beside it, labconfig/ switches off what belongs to teachers; `make formgrader` has it. It also
keeps widgets in the thread of the cells: matplotlib's figures are safe in one thread only.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
c = get_config()  # noqa: F821
c.LabApp.default_url = "/lab/tree/nbs/index.ipynb"
c.LabApp.extra_labextensions_path = [str(HERE / "labextensions")]
