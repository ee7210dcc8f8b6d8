"""Evaluation: scores like those of other people's code, intervals like scipy's, and the command."""

import json
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import AutoModelForCausalLM

from llm_course.cli import main
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import generate
from llm_course.pages.harness import their_marks
from llm_course.pages.storyteller import FOLDER, load_storyteller
from llm_course.training.contamination import NgramIndex, find_leaks, word_ngrams
from llm_course.training.evaluation import (
    bootstrap,
    calibration_error,
    compare,
    questions_needed,
    reliability,
)
from llm_course.training.evaluation_tasks import (
    TASKS,
    Item,
    MultipleChoice,
    build_task,
    needle_items,
    pick,
)
from llm_course.training.harness import as_lm_eval, write_until
from llm_course.training.scoring import Row, Scorer, group_rows, score_rows


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    torch.set_num_threads(1)
    return Scorer(*load_storyteller())


# ---------------------------------------------------------------------------------------- scores


@torch.no_grad()
def test_scores_are_those_of_transformers_on_the_exported_weights(scorer):
    """The folder is the export; `transformers` reads it, one text at a time and without a cache."""
    other = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    task = build_task("recall", num=8)
    requests = [(item.context, choice) for item in task.items for choice in item.choices][::5]
    found = scorer.log_likelihoods(requests)
    for request, score in zip(requests, found, strict=True):
        row = scorer.row(*request)
        ids = torch.tensor([row.ids])
        log_probs = other(ids[:, :-1]).logits[0].log_softmax(-1)
        expected = log_probs.gather(1, ids[0, 1:, None])[-row.num_scored :].sum().item()
        assert score.log_prob == pytest.approx(expected, abs=2e-3)
    text = build_task("bits_per_byte", num=2).texts[0]
    ids = torch.tensor([scorer.encode(text)])
    loss = other(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    assert scorer.document_scores([text])[0].log_prob == pytest.approx(-loss, rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 7}, {"position_type": "learned"}])
def test_shared_prefixes_change_no_score(changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=11, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24)
    config = ModelConfig(**sizes, max_position_embeddings=64, initializer_range=0.5, **changes)
    model = DecoderModel(config).eval()
    generator = torch.Generator().manual_seed(1)

    def tokens(num: int) -> list[int]:
        return torch.randint(11, (num,), generator=generator).tolist()

    stem = tokens(30)
    other = tokens(25)
    rows = [Row(stem + tokens(n), max(1, n - 1)) for n in (1, 2, 5, 9, 9)]
    rows += [Row(stem[:20] + tokens(8), 3), Row(stem + stem[:5], 2), Row([*rows[3].ids, 4], 1)]
    rows += [Row(other + tokens(3), 2), Row(other, 24), Row([3, 4], 1)]
    for row, score in zip(rows, score_rows(model, rows, batch_tokens=20), strict=True):
        ids = torch.tensor([row.ids])
        log_probs = model(ids[:, :-1]).logits[0].log_softmax(-1)[-row.num_scored :]
        targets = ids[0, -row.num_scored :]
        assert score.log_prob == pytest.approx(log_probs.gather(1, targets[:, None]).sum().item())
        assert score.is_greedy == bool((log_probs.argmax(-1) == targets).all())
    assert sorted(i for _, group in group_rows(rows) for i in group) == list(range(len(rows)))


def test_exact_match_is_what_greedy_decoding_writes(scorer):
    task = build_task("recall", num=12)
    both = set()
    for item in task.items:
        right = item.choices[item.answer]
        [score] = scorer.log_likelihoods([(item.context, right)])
        ids = torch.tensor([scorer.encode(item.context)])
        with torch.no_grad():
            out = generate(scorer.model, ids, max_new_tokens=score.num_tokens)[0, ids.shape[1] :]
        written = scorer.tokenizer.decode(out.tolist())
        assert score.is_greedy == (written == right)
        both.add(score.is_greedy)
    assert both == {True, False}


def test_long_texts(scorer):
    text = "\n\n".join(build_task("bits_per_byte", num=4).texts)
    assert len(scorer.tokenizer.encode(text)) > 2 * scorer.max_length
    assert scorer.document_scores([text])[0].num_tokens == len(scorer.tokenizer.encode(text))
    row = scorer.row(text, " And so on.")
    assert scorer.max_length // 2 < len(row.ids) <= scorer.max_length + 1
    with pytest.raises(ValueError, match="room in the model's context of 512"):
        scorer.row("Then", text)
    with pytest.raises(ValueError, match="has 0 tokens"):
        scorer.row("Then", "")
    with pytest.raises(ValueError, match="nothing to score"):
        scorer.document_scores(["Then", ""])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row([1, 2, 3], 0), "num_scored=0 must be"),
        (Row([1, 2, 3], -1), "num_scored=-1 must be"),
        (Row([1, 2, 3], 3), "row 1 has 3 tokens, and 3 can't be scored"),
        (Row([], 1), "row 1 has 0 tokens"),
        (Row([1, 10**6], 1), "token id 1000000 at position 1 is outside"),
        (Row([1, -1], 1), "token id -1 at position 1"),
        (Row([1.5, 2], 1), "whole numbers"),
    ],
)
def test_a_row_that_has_no_score_is_refused(scorer, row, message):
    with pytest.raises(ValueError, match=message):
        score_rows(scorer.model, [Row([1, 2], 1), row])


# ------------------------------------------------------------------------------------- statistics


def test_bootstrap_against_scipy_and_a_formula():
    marks = (np.random.default_rng(3).random(300) < 0.7).astype(float).tolist()
    found = bootstrap(marks, resamples=4000)
    theirs = scipy.stats.bootstrap(
        (marks,), np.mean, method="percentile", n_resamples=4000, rng=1
    ).confidence_interval
    assert found.value == pytest.approx(statistics.fmean(marks))
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.006)
    half = 1.96 * math.sqrt(found.value * (1 - found.value) / 300)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.06)


def test_bootstrap_of_a_ratio_has_the_error_of_the_delta_method():
    rng = np.random.default_rng(0)
    sizes = rng.integers(500, 1500, 200).astype(float)
    bits = 0.3 * sizes + 20 * rng.standard_normal(200)
    found = bootstrap(bits, sizes, resamples=4000)
    rate = bits.sum() / sizes.sum()
    error = math.sqrt(((bits - rate * sizes) ** 2).sum() * 200 / 199) / sizes.sum()
    assert found.value == pytest.approx(rate)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.06)


def test_groups_are_drawn_together():
    marks = (np.random.default_rng(1).random(60) < 0.6).astype(float).tolist()
    alone = bootstrap(marks)
    repeated = [mark for mark in marks for _ in range(9)]
    grouped = bootstrap(repeated, groups=[i // 9 for i in range(540)])
    assert grouped[:3] == pytest.approx(alone[:3])
    apart = bootstrap(repeated)
    assert (alone.high - alone.low) / (apart.high - apart.low) == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "0 values in 0 group"),
        (([1.0],), "needs at least two groups"),
        (([1.0, 0.0], [1.0]), "values has 2, sizes has 1"),
        (([1.0, 0.0], [1.0, 0.0]), "size=0.0 must be positive"),
        (([1.0, math.nan],), r"values\[1\]=nan must be"),
        ((None,), "values=None must be a list"),
        ((["a", "b"],), r"values\[0\]='a' must be"),
    ],
)
def test_refused_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [1]}, "groups has 1 entries for 2 values"),
        ({"groups": [1, 1]}, "needs at least two groups"),
        ({"confidence": 1}, "confidence=1 must be"),
        ({"resamples": 0}, "resamples=0 must be"),
        ({"seed": None}, "seed=None must be"),
        ({"seed": -1}, "seed=-1 must be"),
    ],
)
def test_refused_options(options, message):
    for call in (bootstrap, lambda values, **how: compare(values, values, **how)):
        with pytest.raises(ValueError, match=message):
            call([0.0, 1.0], **options)


def test_comparison_of_pairs():
    first = [1, 1, 0, 0, 1, 0, 1, 1, 0, 1] * 10
    second = [1, 1, 1, 0, 1, 0, 1, 1, 0, 1] * 10  # one more of ten
    found = compare(first, second)
    assert found.difference.value == pytest.approx(0.1) and found.disagree == pytest.approx(0.1)
    assert found.difference.low > 0 and found.wins == 1
    back = compare(second, first)
    assert back.difference[:3] == pytest.approx([-found.difference[i] for i in (0, 2, 1)], abs=0.01)
    with pytest.raises(ValueError, match="first has 100, second has 99"):
        compare(first, second[1:])
    for kind in (np.uint8, np.bool_, np.float32):  # 0 - 1 is 255 in bytes, and refused for bools
        assert compare(np.array(second, kind), np.array(first, kind)) == back


def test_questions_needed_by_hand():
    # (1.95996 + 0.84162)^2 * (0.15 - 0.0025) / 0.0025 = 463.1
    assert questions_needed(0.05, 0.15) == 464
    assert questions_needed(-0.05, 0.15) == 464
    with pytest.raises(ValueError, match="difference=0.2"):
        questions_needed(0.2, 0.15)
    for difference in (0, math.nan, None, "0.1"):
        with pytest.raises(ValueError, match="difference="):
            questions_needed(difference, 0.15)
    needed = [questions_needed(0.05, 0.15, power=power) for power in (0.001, 0.01, 0.1, 0.5)]
    assert needed == sorted(needed) and needed[0] == 1  # chance finds that often without any


def test_calibration_by_hand():
    bins = reliability([0.95, 1.0, 0.15, 0.55], [True, False, False, True], num_bins=10)
    assert [one.count for one in bins] == [1, 1, 2]
    expected = (abs(0 - 0.15) + abs(1 - 0.55) + 2 * abs(0.5 - 0.975)) / 4
    assert calibration_error(bins) == pytest.approx(expected)
    with pytest.raises(ValueError, match="confidence=1.5"):
        reliability([1.5], [True])
    with pytest.raises(ValueError, match="correct=7"):
        reliability([0.5], [7])
    with pytest.raises(ValueError, match="confidences has 1, correct has 0"):
        reliability([0.5], [])
    for empty in ([], [bins[0]._replace(count=0)]):
        with pytest.raises(ValueError, match="the bins contain no answers"):
            calibration_error(empty)


# ------------------------------------------------------------------------------------------ tasks


@pytest.mark.parametrize("level", ["easy", "medium", "hard"])
@pytest.mark.parametrize("name", [name for name in TASKS if name != "bits_per_byte"])
def test_tasks_are_fair_and_reproducible(name, level):
    task = build_task(name, level=level, num=60)
    assert task == build_task(name, level=level, num=60) and len(task.items) == 60
    places = {item.answer for item in task.items}
    assert len(places) > 1  # the right choice is not always in the same place
    for item in task.items:
        assert len(set(item.choices)) == len(item.choices) > 1
        assert all(choice.strip() for choice in item.choices)


def test_the_storyteller_knows_more_than_a_guess(scorer):
    results = {name: build_task(name, num=30).measure(scorer) for name in ("pairs", "recall")}
    for result in results.values():
        assert result.metrics["accuracy"].low > result.metrics["chance"].value
    assert results["recall"].metrics["exact_match"].value > 0.4


def test_planted_leak():
    stories = build_task("bits_per_byte", num=40).texts
    assert find_leaks(stories[:30], stories[30:]) == []
    assert [leak.index for leak in find_leaks([*stories[:30], stories[33]], stories[30:])] == [3]
    assert NgramIndex([], n=3).overlap("a b c") == 0


def test_a_question_that_could_never_be_found_is_refused():
    index = NgramIndex(["Then he asked: where is the red ball now? Nobody knew."], n=6)
    assert index.overlap("Where is the red ball now?") == 1
    for text in ("Where is the ball?", "...", ""):
        with pytest.raises(ValueError, match="fewer than n=6 words"):
            index.overlap(text)
    with pytest.raises(ValueError, match="'Who is it.' has fewer than n=13 words"):
        find_leaks([], ["Who is it?"])
    for n in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match=f"n={n} must be a whole number"):
            word_ngrams("a b c", n)
    for text in (None, b"a b c", 3):
        with pytest.raises(ValueError, match="text must be a str"):
            word_ngrams(text, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 2}, "item 1 has 2 choices, and its answer is number 2"),
        ({"answer": -1}, "answer=-1 must be"),
        ({"answer": None}, "answer=None must be"),
        ({"choices": ()}, "item 1 has 0 choices"),
        ({"choices": "ab"}, "choices='ab' must be a list"),
    ],
)
def test_an_item_without_a_right_answer_is_refused_before_any_is_scored(change, message):
    item = Item("Then", (" he", " she"), 0, group=0, kind="who")
    with pytest.raises(ValueError, match=message):
        MultipleChoice("mine", [item, item._replace(**change)])


def test_metrics_choices_and_distances_are_checked():
    for metrics, message in ((("acc",), "metric='acc' is unknown"), ((), "metrics is empty")):
        with pytest.raises(ValueError, match=message):
            MultipleChoice("mine", [], metrics)
    assert pick([-math.inf, -2.0]) == (1, 1.0)
    for log_probs in ([], [math.nan, -1.0], [-1.0, math.nan], [-math.inf], [math.inf, 0.0]):
        with pytest.raises(ValueError, match="can't be compared"):
            pick(log_probs)
    for options, message in (
        ({"num": 0}, "num=0 must be"),
        ({"distances": ()}, "distances is empty"),
        ({"distances": (-5,)}, "distance=-5 must be"),
        ({"distances": 50}, "distances=50 must be a list"),
    ):
        with pytest.raises(ValueError, match=message):
            needle_items("easy", **{"num": 1, "seed": 0} | options)


# ---------------------------------------------------------------------------------------- command


def test_command_writes_and_compares(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "--model", str(FOLDER), "--questions", "12", "--output", "a.json"]
    assert main([*words, "--tasks", "pairs,bits_per_byte"]) == 0
    assert "pairs          accuracy" in capsys.readouterr().out
    report = json.loads((tmp_path / "a.json").read_text())
    assert list(report["tasks"]) == ["pairs", "bits_per_byte"]
    pairs = report["tasks"]["pairs"]
    mean = statistics.fmean(pairs["scores"])
    assert pairs["metrics"]["accuracy"]["value"] == pytest.approx(mean)
    assert sum(one["count"] for one in pairs["reliability"]) == 12
    again = [*words[:-1], "b.json", "--tasks", "pairs", "--compare", "a.json"]
    assert main(again) == 0 and "minus the other     0.000" in capsys.readouterr().out
    assert main([*again, "--seed", "5"]) != 0
    assert "only the same questions" in capsys.readouterr().err
    assert main(["evaluate", "--model", str(FOLDER)]) != 0
    assert "only a run has validation data" in capsys.readouterr().err
    assert main(["evaluate", "--model", str(FOLDER), "--tasks", "pairs"]) != 0
    assert "say where to write, --output FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tasks pairs,nothing", "tasks='nothing' is unknown"),
        ("--tasks pairs --output no/such/a.json", "name a file in a folder that exists"),
        ("--tasks pairs --output .", "name a file in a folder that exists"),
        ("--tasks pairs --compare other.txt", "this isn't an evaluation.json: Expecting"),
        ("--tasks pairs --compare list.json", "this isn't an evaluation.json: it has no"),
        ("--tasks pairs --compare same.json --seed 5", "only the same questions"),
        ("--tasks all --compare same.json", "it has no task 'bits_per_byte', only ['pairs']"),
        ("--tasks pairs,all --compare same.json", "it has no task 'bits_per_byte'"),
    ],
)
def test_what_can_not_be_written_or_compared_is_refused_first(
    tmp_path, capsys, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Scorer, "log_likelihoods", None)  # nothing is measured
    (tmp_path / "other.txt").write_text("pairs")
    (tmp_path / "list.json").write_text("[]")
    same = {"questions": 200, "level": "easy", "seed": 2121, "tasks": {"pairs": {}}}
    (tmp_path / "same.json").write_text(json.dumps(same))
    output = "" if "--output" in words else " --output a.json"
    assert main(["evaluate", "--model", str(FOLDER), *(words + output).split()]) == 2
    assert message in capsys.readouterr().err


def test_a_run_gets_its_report(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = "--model.hidden_size 16 --model.num_layers 1 --model.num_heads 2 --data.corpus stories"
    small += " --training.max_steps 2 --data.sequence_length 64 --run-dir run"
    assert main(["train", *small.split(), "--data.stories.num_bytes", "60000"]) == 0
    assert main("evaluate --run run --tasks all --questions 12".split()) == 0
    report = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert set(report["tasks"]) == set(TASKS)
    capsys.readouterr()
    assert main(["evaluate", "--run", "run"]) == 0
    assert "val_loss" in capsys.readouterr().out  # without --tasks as ever


# ---------------------------------------------------------------------------------------- harness


def test_write_until(scorer):
    text = write_until(scorer, "Once upon a time there was", {"until": ".", "max_gen_toks": 30})
    assert text and "." not in text


def test_harness_gives_our_numbers(scorer):
    """One task about the stories, defined for lm-evaluation-harness, on the same questions."""
    pytest.importorskip(
        "lm_eval", reason="lm_eval is missing: pip install 'llm_course[evaluation]'"
    )
    task = build_task("recall", num=12)
    assert isinstance(task, MultipleChoice)
    theirs = their_marks(as_lm_eval(scorer), task)
    ours = task.measure(scorer).metrics
    assert theirs["acc"] == pytest.approx(ours["accuracy"].value)
    assert theirs["acc_norm"] == pytest.approx(ours["accuracy_per_byte"].value)


def test_harness_requests(scorer):
    pytest.importorskip("lm_eval", reason="pip install 'llm_course[evaluation]'")
    model = as_lm_eval(scorer)
    text = build_task("bits_per_byte", num=2).texts[0]
    [rolling] = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    assert rolling == scorer.document_scores([text])[0].log_prob
    [(found, greedy)] = model.loglikelihood([SimpleNamespace(args=("Once upon", " a time"))])
    assert (found, greedy) == scorer.log_likelihoods([("Once upon", " a time")])[0][::2]
