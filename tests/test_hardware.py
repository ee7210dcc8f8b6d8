"""What the machine computes with: asked of the machine, once, and refused in time."""

from functools import partial

import pytest
import torch

from llm_course import hardware
from llm_course.hardware import (
    computes_in_bf16,
    container_limit,
    cpu_is_amd,
    cpu_multiplies_bf16,
    matmul_flops,
    memory_bytes,
    resolve_device,
    resolve_precision,
)


@pytest.fixture
def asked_again():
    """The answers are kept for the process: a test that plays another machine asks again."""
    questions = (hardware._ask_for_bf16, hardware._ask_for_amd)
    for question in questions:
        question.cache_clear()
    yield
    for question in questions:
        question.cache_clear()


def test_device_is_resolved_or_refused_at_once():
    assert resolve_device("cpu") == torch.device("cpu")
    wanted = (
        torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    )
    assert resolve_device("auto").type == wanted
    for name in ("cuda:77", "gpu", ""):
        with pytest.raises(
            ValueError, match=f"training.device='{name}' cannot be used here.*auto or cpu"
        ):
            resolve_device(name)


def test_bf16_is_asked_of_the_hardware(monkeypatch, asked_again):
    for answers, wanted in (((False, False), False), ((True, False), True), ((False, True), True)):
        for name, answer in zip(
            ("_is_avx512_bf16_supported", "_is_amx_tile_supported"), answers, strict=True
        ):
            monkeypatch.setattr(torch.cpu, name, partial(bool, answer))
        hardware._ask_for_bf16.cache_clear()
        assert computes_in_bf16(torch.device("cpu")) is wanted
        assert resolve_precision("auto", torch.device("cpu")) == ("bf16" if wanted else "fp32")
        assert all(
            resolve_precision(name, torch.device("cpu")) == name
            for name in ("fp32", "bf16", "fp16")
        )
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert not computes_in_bf16(torch.device("cuda"))  # emulated only
    assert not computes_in_bf16(torch.device("mps"))


def test_the_processor_is_asked_once(monkeypatch, asked_again):
    questions = []
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: questions.append(1))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert cpu_multiplies_bf16() and cpu_multiplies_bf16()
    assert len(questions) == 1


@pytest.mark.parametrize("maker, expected", [("AuthenticAMD", True), ("GenuineIntel", False)])
@pytest.mark.parametrize("has_cpuinfo", [True, False])
def test_the_maker_of_the_processor(maker, expected, has_cpuinfo, monkeypatch, asked_again):
    """Linux tells in /proc/cpuinfo, other systems in what Python calls the processor."""

    class CpuInfo:
        def __init__(self, path):
            assert path == "/proc/cpuinfo"

        def exists(self):
            return has_cpuinfo

        def read_text(self):
            return f"processor : 0\nvendor_id : {maker}\n"

    monkeypatch.setattr(hardware, "Path", CpuInfo)
    monkeypatch.setattr(hardware.platform, "processor", lambda: f"AMD64 Family 25, {maker}")
    assert cpu_is_amd() is expected


def test_a_compiled_graph_knows_the_answers():
    """Without a break in the graph: the compiler asks, and writes the answer down."""

    @torch.compile(fullgraph=True, backend="eager")
    def count(x):
        return x + cpu_multiplies_bf16() + 2 * cpu_is_amd()

    expected = int(cpu_multiplies_bf16()) + 2 * int(cpu_is_amd())
    assert count(torch.zeros(())).item() == expected


def test_an_accelerator_is_taken_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert resolve_device("auto") == torch.device("meta")
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")


def test_products_are_measured():
    cpu = torch.device("cpu")
    flops = matmul_flops(cpu, torch.float32, size=64, seconds=0.01)
    assert 1e6 < flops < 1e15
    assert matmul_flops(cpu, torch.float32, size=8, seconds=0.0) > 0  # at least one product


# ---------------------------------------------------------------- the memory of a container


@pytest.mark.parametrize(
    "files, limit",
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "1000\n"}, 1000),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "3000",
                "sys/fs/cgroup/a/memory.max": "2000",
                "sys/fs/cgroup/memory.max": "max",
            },
            2000,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/",
                "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            4000,
        ),
        (
            {  # a namespace: the path is one of outside, and the limit lies at the root
                "proc/self/cgroup": "4:memory:/docker/1",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000",
            },
            5000,
        ),
        ({"proc/self/cgroup": "nonsense", "sys/fs/cgroup/memory.max": "1"}, None),
    ],
)
def test_the_limit_of_a_container(files, limit, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_limit(tmp_path) == limit


def test_a_container_bounds_the_main_memory(monkeypatch):
    cpu = torch.device("cpu")
    there = memory_bytes(cpu)
    for limit, expected in ((None, max(there, 1)), (5, 5), (2**62, there)):
        monkeypatch.setattr(hardware, "container_limit", lambda limit=limit: limit)
        found = memory_bytes(cpu)
        assert found == expected or limit is None and found >= there
    monkeypatch.delattr(hardware.os, "sysconf", raising=False)  # as on Windows
    assert memory_bytes(cpu) == 2**62


def test_what_is_no_device_and_no_size_is_refused():
    for name in (2.5, "abc"):
        with pytest.raises(ValueError, match="training.device=.* cannot be used here"):
            resolve_device(name)
    for size in (0, -1, 2.5, "8"):
        with pytest.raises(ValueError, match="size=.* must be a whole number"):
            matmul_flops(torch.device("cpu"), torch.float32, size=size)


def test_memory_is_known_of_devices_that_share_the_systems():
    assert memory_bytes(torch.device("cpu")) == memory_bytes(torch.device("mps"))
    assert memory_bytes(torch.device("xpu")) is None and memory_bytes(torch.device("meta")) is None
