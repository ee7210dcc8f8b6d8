"""The doctor: sound devices pass, and each planted fault of a device is found and named."""

import itertools
import warnings

import pytest
import torch

from llm_course.commands import doctor
from llm_course.commands.doctor import check_device, doctor_command
from llm_course.model.config import ModelConfig

SMALL = dict(
    vocab_size=101,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=96,
    max_position_embeddings=64,
)
EXPERTS = dict(use_moe=True, num_experts=4, top_k=2)


def second_time(function, wrong):
    """`function` for the reference; for what follows `wrong` of its result."""
    calls = itertools.count()
    return lambda *args, **options: (lambda good: good if next(calls) < 4 else wrong(good))(
        function(*args, **options)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(
            norm_type="layernorm",
            use_glu=False,
            position_type="learned",
            attention_bias=True,
            mlp_bias=True,
        ),
        EXPERTS,
        dict(num_mtp_layers=1),
        dict(dropout=0.5, sliding_window=8),
    ],
)
def test_the_cpu_agrees_with_itself(options):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        differences = check_device(
            "cpu", config=ModelConfig(**(SMALL | options)), batch_size=2, sequence_length=32
        )
    assert {
        "logits",
        "loss",
        "gradient of layers.0.self_attn.q_proj.weight",
        "step of norm.weight",
    } <= set(differences)
    assert max(differences.values()) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_the_default_model_reads_as_long_a_text_as_is_asked():
    assert max(check_device("cpu", batch_size=1, sequence_length=300).values()) == 0


@pytest.mark.parametrize(
    "options", [{}, dict(norm_type="layernorm", position_type="learned", attention_bias=True)]
)
def test_rounding_is_no_fault(options):
    """Another order of summation, also where a gradient is nothing but rounding: without RoPE, that
    of the keys' bias.
    """
    # two passes, and one for the logits
    rough = torch.nn.functional.linear
    calls = itertools.count()
    good = 2 * 2 * 7 + 1

    def other_order(x, weight, bias=None):
        if next(calls) < good:
            return rough(x, weight, bias)
        return rough(x.flip(-1), weight.flip(-1), bias)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        patch.setattr(torch.nn.functional, "linear", other_order)
        differences = check_device("cpu", config=ModelConfig(**(SMALL | options)))
    assert 0 < max(differences.values()) < 1e-4


@pytest.mark.parametrize(
    "wrong, share",
    [
        (lambda x: x * 1.01, 2e-3),
        (lambda x: x.roll(1, dims=-1), 0.1),
        (lambda x: x * torch.nan, float("inf")),
    ],
)
def test_a_broken_operation_is_found(monkeypatch, wrong, share):
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", second_time(attention, wrong)
    )
    with pytest.warns(
        RuntimeWarning,
        match=r"cpu disagrees with the CPU: .* differs by .*tolerance 1e-03",
    ):
        differences = check_device("cpu")
    assert max(differences.values()) >= share


def test_a_broken_backward_alone_is_found(monkeypatch):
    class Wrong(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, d: d * 1.1)

    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", second_time(attention, Wrong.apply)
    )
    with pytest.warns(RuntimeWarning, match="gradient of "):
        differences = check_device("cpu")
    assert differences["loss"] == differences["logits"] == 0


def test_a_broken_optimizer_is_found(monkeypatch):
    step = torch.optim.AdamW.step
    calls = itertools.count()
    # rows, columns
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: step(self) if next(calls) < 2 else None
    )
    with pytest.warns(RuntimeWarning, match="step of "):
        differences = check_device("cpu")
    assert all(
        name.startswith("step of ") for name, difference in differences.items() if difference
    )


@pytest.mark.parametrize("operation", ["addcdiv_", "addcmul_"])
def test_writes_that_are_lost_in_a_transposed_matrix_are_found(monkeypatch, operation):
    # matrices of the default model
    good = getattr(torch.Tensor, operation)
    calls = itertools.count()
    reference = 15

    def loses(self, *args, **options):
        return (
            self
            if not self.is_contiguous() and next(calls) >= reference
            else good(self, *args, **options)
        )

    monkeypatch.setattr(torch.Tensor, operation, loses)
    with pytest.warns(RuntimeWarning, match="stored by columns"):
        differences = check_device("cpu")
    assert len([name for name in differences if name.endswith("stored by columns")]) == reference
    assert all(
        name.endswith("stored by columns") for name, difference in differences.items() if difference
    )


def test_tolerance_decides(monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        second_time(attention, lambda x: x * 1.01),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        check_device("cpu", tolerance=0.5)


@pytest.mark.skipif(
    not torch.cuda.is_available() and not torch.backends.mps.is_available(), reason="no accelerator"
)
@pytest.mark.parametrize(
    "options", [{}, dict(norm_type="layernorm", use_glu=False, attention_bias=True)]
)
def test_the_accelerator_agrees(options):
    differences = check_device(
        "cuda" if torch.cuda.is_available() else "mps", config=ModelConfig(**(SMALL | options))
    )
    assert max(differences.values()) < 1e-3


def test_doctor_says_that_the_cpu_agrees_with_itself(capsys, monkeypatch):
    # the compiler takes ten seconds
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(doctor, "matmul_flops", lambda *a, **k: 5e10)
    assert doctor_command(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out and "50 GFLOP/s" in out and "sound" in out


def test_doctor_finds_a_compiler_that_computes_wrong(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "matmul_flops", lambda *a, **k: 5e10)
    monkeypatch.setattr(torch, "compile", lambda function: lambda x: function(x) * 1.01)
    assert doctor_command(["--device", "cpu"]) == 1
    assert "gives WRONG numbers" in capsys.readouterr().out


def test_doctor_finds_wrong_attention(capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(doctor, "matmul_flops", lambda *a, **k: 5e10)
    attention = torch.nn.functional.scaled_dot_product_attention
    calls = []

    def broken(*args, **options):  # from the second model on
        calls.append(1)
        return attention(*args, **options) * (1.0 if len(calls) <= 4 else 1.01)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    assert doctor_command(["--device", "cpu"]) == 1
    assert "cpu disagrees with the CPU" in capsys.readouterr().out


def test_doctor_finds_a_device_that_computes_wrong(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "matmul_flops", lambda *a, **k: 5e10)

    def broken(function):
        raise RuntimeError("no compiler here\nand more")

    def wrong(device):
        import warnings

        warnings.warn("cpu disagrees with the CPU", RuntimeWarning, stacklevel=2)
        return {"logits": 0.5}

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(doctor, "check_device", wrong)
    assert doctor_command(["--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert (
        "does not work here, leave training.compile out: no compiler here" in out
        and "disagrees with the CPU" in out
    )
    assert "and more" not in out


@pytest.mark.parametrize("tolerance", [0, float("nan"), float("inf")])
def test_a_wrong_tolerance_is_refused(tolerance):
    with pytest.raises(ValueError, match=f"tolerance={tolerance}"):
        check_device("cpu", tolerance=tolerance)
