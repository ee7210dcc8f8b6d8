"""Scaling laws: the fit, its corner cases, and the floor that the recorded runs are measured by."""

import math

import numpy as np
import pytest
import torch

from llm_course.pages import larger
from llm_course.pages import scaling as page
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import is_held_out, read_story, write_story
from llm_course.training.config import Config
from llm_course.training.scaling import (
    Law,
    bootstrap_laws,
    fit_law,
    interval,
    slice_minimum,
)
from llm_course.training.scoring import Scorer

PLANTED = Law(E=0.5, A=400.0, a=0.7, B=900.0, b=0.45)
N = np.geomspace(1e4, 1e6, 6).repeat(3)
D = 3e10 / N * np.tile([1.0, 3.0, 9.0], 6)


# ------------------------------------------------------------------------------ the fit


@pytest.mark.parametrize(
    "law",
    [
        PLANTED,
        Law(E=0.0, A=50.0, a=0.3, B=700.0, b=0.4),
        Law(E=1.8, A=480.0, a=0.35, B=2000.0, b=0.37),
        Law(E=0.3, A=3e6, a=1.4, B=2e5, b=0.9),
    ],
)
def test_a_planted_law_is_found(law):
    found = fit_law(N, D, law.loss(N, D))
    assert found.loss(N, D) == pytest.approx(law.loss(N, D), rel=2e-3)
    assert found[2] == pytest.approx(law.a, abs=0.03) and found.b == pytest.approx(law.b, abs=0.03)


def test_a_known_floor_stays_what_it_is():
    law = fit_law(N, D, PLANTED.loss(N, D), floor=PLANTED.E)
    assert law.E == PLANTED.E
    assert law.a == pytest.approx(PLANTED.a, abs=0.01)
    wrong = fit_law(N, D, PLANTED.loss(N, D), floor=0.2)
    assert wrong.E == 0.2 and wrong.b < law.b


def test_the_fit_is_at_least_as_good_as_a_general_optimizer():
    """An outside oracle: SciPy's least squares, from a good start, finds nothing better."""
    optimize = pytest.importorskip("scipy.optimize")
    noise = np.random.default_rng(3).standard_normal(len(N))
    losses = PLANTED.loss(N, D) * np.exp(0.02 * noise)

    def error(x):
        E, A, a, B, b = np.exp(x)
        return (E + A / N**a + B / D**b) / losses - 1

    theirs = optimize.least_squares(error, np.log(PLANTED))
    ours = error(np.log(fit_law(N, D, losses)))
    assert (ours**2).sum() < 1.02 * 2 * theirs.cost


def test_what_cannot_be_fitted_is_refused():
    losses = PLANTED.loss(N, D)
    with pytest.raises(ValueError, match="4 runs: a law needs at least 5"):
        fit_law(N[:4], D[:4], losses[:4])
    fit_law(N[:4], D[:4], losses[:4], floor=0.1)
    with pytest.raises(ValueError, match="leave out runs that diverged"):
        fit_law(N, D, np.where(N == N[0], np.nan, losses))
    with pytest.raises(ValueError, match="the losses don't fall"):
        fit_law(N, D, N / 1e4, floor=5e3)
    for floor in (math.nan, -1.0, "0"):
        with pytest.raises(ValueError, match="floor=.* must be finite and not negative"):
            fit_law(N, D, losses, floor=floor)
    with pytest.raises(ValueError, match="losses has 17"):
        fit_law(N, D, losses[:-1])
    with pytest.raises(ValueError, match="must be positive"):
        fit_law(N, D, np.where(N == N[0], 0.0, losses))
    with pytest.raises(ValueError, match="all runs have the same N"):
        fit_law(np.full_like(N, N[0]), D, losses)


@pytest.mark.parametrize("size", [0, -5.0, math.nan, None, "many", [1e5, 0.0], np.array([-1, 2])])
def test_a_law_is_asked_about_positive_sizes(size):
    with pytest.raises(ValueError, match="must be positive"):
        PLANTED.loss(size, 1e6)
    with pytest.raises(ValueError, match="must be positive"):
        PLANTED.loss(1e6, size)


def test_a_law_takes_lists_and_whole_numbers():
    expected = PLANTED.loss(np.array([1e4, 2e4]), 1e6)
    assert (PLANTED.loss([10_000, 20_000], 10**6) == expected).all()


@pytest.mark.parametrize("name", ["A", "a", "B", "b"])
def test_no_best_size_where_one_term_is_missing(name):
    with pytest.raises(ValueError, match=f"{name}=0.0 must be positive.*doesn't matter"):
        PLANTED._replace(**{name: 0.0}).best_size(1e10)


def test_too_few_runs_to_draw_from_are_refused_at_once():
    losses = PLANTED.loss(N, D)
    for floor in (None, 0.1):
        with pytest.raises(ValueError, match="5 runs: give at least 6"):
            bootstrap_laws(N[:5], D[:5], losses[:5], floor=floor)
    with pytest.raises(ValueError, match="values is empty"):
        interval([])
    with pytest.raises(ValueError, match=r"values\[1\]=nan"):
        interval([1.0, math.nan])


def test_the_best_size_is_where_no_other_is_better():
    for compute in (1e11, 1e20):
        size, tokens = PLANTED.best_size(compute)
        assert 6 * size * tokens == pytest.approx(compute)
        best = PLANTED.loss(size, tokens)
        for factor in (0.97, 1.03):
            assert PLANTED.loss(size * factor, tokens / factor) > best
    with pytest.raises(ValueError, match="compute"):
        PLANTED.best_size(0)


def test_resampled_laws_are_the_same_for_the_same_seed_and_hold_the_truth():
    losses = PLANTED.loss(N, D) * np.exp(0.01 * np.random.default_rng(1).standard_normal(len(N)))
    laws = bootstrap_laws(N, D, losses, repeats=20, seed=4)
    assert laws == bootstrap_laws(N, D, losses, repeats=20, seed=4)
    low, high = interval([law.b for law in laws], level=1 - 1e-9)
    assert low < PLANTED.b < high
    assert interval([1.0, 2.0, 3.0], level=0.5) == (1.5, 2.5)


def test_a_parabola_over_the_logarithm_has_its_minimum_found():
    sizes = np.geomspace(1e4, 1e6, 5)
    losses = 1.2 + 0.3 * np.log(sizes / 7e4) ** 2
    size, loss = slice_minimum(sizes, losses)
    assert (size, loss) == (pytest.approx(7e4), pytest.approx(1.2))
    with pytest.raises(ValueError, match="at least three"):
        slice_minimum(sizes[:2], losses[:2])
    for curve in (-losses, 3 - np.log(sizes), np.ones(5)):  # a peak, a straight line, a flat one
        with pytest.raises(ValueError, match="no minimum"):
            slice_minimum(sizes, curve)
    with pytest.raises(ValueError, match="2 sizes: a parabola"):
        slice_minimum([1e4, 1e4, 1e5, 1e5], losses[:4])
    with pytest.raises(ValueError, match="must be positive"):
        slice_minimum(sizes - sizes[0], losses)
    with pytest.raises(ValueError, match="differ in length"):
        slice_minimum(sizes, losses[1:])


# ------------------------------------------------------------------------------ the floor


@pytest.fixture(scope="module")
def story_data(tmp_path_factory):
    config = Config(
        run_dir=str(tmp_path_factory.mktemp("run")),
        model={"max_position_embeddings": 96},
        data={"corpus": "stories", "stories": {"level": "easy", "num_bytes": 60_000}}
        | {"vocab_size": 400, "sequence_length": 96, "val_fraction": 0.3},
    )
    data = page.StoryTask(config).build_data()
    data.prepare_data()
    data.setup()
    return data


def test_validation_rows_are_the_beginnings_of_held_out_stories(story_data):
    batch = next(iter(story_data.val_dataloader()))
    eos = story_data.tokenizer.eos_token_id
    assert (batch["input_ids"][:, 0] == eos).all() and not (batch["labels"] == eos).any()
    texts = [story_data.tokenizer.decode(row.tolist()) for row in batch["labels"]]
    stories = [story_data.tokenizer.decode(one) for one in story_data.val_dataset.documents]
    assert all(is_held_out(story, 0.3) for story in stories)
    assert all(story.startswith(text) for story, text in zip(stories, texts, strict=False))


def test_the_floor_is_the_information_in_these_very_texts(story_data):
    """Read each beginning as an unfinished story: the finished choices can't hold more bits."""
    rows = story_data.val_dataset.rows[:, 1:]
    texts = [story_data.tokenizer.decode(row.tolist()) for row in rows]
    bits = math.fsum(read_story(text, "easy").bits for text in texts)
    floor = story_data.floor * rows.size / math.log(2)
    assert bits <= floor < bits + 12 * len(texts)  # the last, unfinished choice adds a little
    assert 0.2 < story_data.floor < 0.7


# ------------------------------------------------------------------------------ the record


def test_the_record_holds_what_the_page_says():
    runs = page.scaling_runs()
    assert len(set(runs.N)) >= 9 and runs.N.min() < 2e4 and runs.N.max() > 1.5e6
    assert len(set(runs.budget)) == 4
    for budget in set(runs.budget):
        chosen = page.of_budget(runs, budget)
        assert len(chosen.N) >= 5
        assert 6 * chosen.N * chosen.D == pytest.approx(budget, rel=0.02)
    floor = page.record()["floor"]
    assert (runs.loss > floor).all()
    found = page.record()["prediction"]
    assert 6 * found["N"] * found["D"] == pytest.approx(4 * runs.budget.max(), rel=0.02)
    law = fit_law(runs.N, runs.D, runs.loss, floor=floor)
    assert law.loss(found["N"], found["D"]) == pytest.approx(found["fixed"][1], rel=1e-3)
    assert all(row["sample"].startswith("Once upon a time") for row in page.single_runs())


def test_seeds_of_a_run_make_one_run_with_their_mean_loss():
    runs = page.scaling_runs()
    smallest = min(runs.budget)
    seeds = page.seeds_of(smallest)
    chosen = page.of_budget(runs, smallest)
    assert [*seeds] == chosen.N.tolist() and {len(losses) for losses in seeds.values()} == {3}
    assert [np.mean(losses) for losses in seeds.values()] == pytest.approx(chosen.loss.tolist())
    assert len(page.single_runs()) == len(runs.N)


def test_the_recorded_runs_are_those_of_the_configuration(tmp_path):
    from llm_course.training.sweep import read_sweep

    def configs(name):
        points = read_sweep(page.RECORD.parents[2] / "configs" / f"{name}.yaml", tmp_path)
        return [point.config for point in points]

    stored = page.record()
    runs = [(c.training.max_steps * 4 * 256, c.training.seed) for c in configs("scaling")]
    assert runs == [(row["D"], row["seed"]) for row in stored["scaling"]], "run `make scaling`"
    runs = [(c.model.hidden_size, c.optimization.learning_rate) for c in configs("transfer")]
    assert runs == [(row["width"], row["rate"]) for row in stored["transfer"]], "run `make scaling`"
    runs = [(c.training.batch_size * 256, c.optimization.learning_rate) for c in configs("batches")]
    assert runs == [(row["tokens"], row["rate"]) for row in stored["batches"]], "run `make scaling`"


def test_the_law_and_the_parabolas_agree_on_the_best_size():
    runs = page.scaling_runs()
    law = fit_law(runs.N, runs.D, runs.loss, floor=page.record()["floor"])
    for budget in set(runs.budget):
        near = page.best_of(runs, budget)
        assert near.loss.max() == np.sort(page.of_budget(runs, budget).loss)[3]
        size, _ = slice_minimum(near.N, near.loss)
        assert 0.75 < law.best_size(budget)[0] / size < 1.25


TASKS = ("standard", "muP")


def test_the_best_rate_moves_less_in_mup():
    best = page.best_rates()
    for optimizer in ("adamw", "muon"):
        widths = best[optimizer, "standard"]
        assert len(widths) >= 4 and [*widths] == sorted(widths)
        drift = {task: best[optimizer, task][32] / best[optimizer, task][128] for task in TASKS}
        assert drift["standard"] > 2 > drift["muP"]
        curves = [page.rate_curves(optimizer, task) for task in TASKS]
        assert curves[0][64] == curves[1][64]  # the base width: the same runs


# ------------------------------------------------------------------------------ batches


def test_a_planted_critical_batch_is_found():
    planted = {size: 50 * (1 + 2000 / size) for size in (256, 512, 1024, 2048, 4096)}
    assert page.critical_batch(planted) == pytest.approx((50, 2000))


def test_the_steps_to_a_loss_are_those_of_the_best_rate(monkeypatch):
    rows = [
        {"tokens": 512, "rate": 0.1, "curve": [[10, 4.0], [20, 3.0], [30, 2.5]]},
        {"tokens": 512, "rate": 0.2, "curve": [[10, 4.0], [20, 2.0], [30, 2.2]]},
        {"tokens": 256, "rate": 0.1, "curve": [[10, 4.0], [20, 3.5], [30, 3.1]]},
    ]
    monkeypatch.setattr(page, "record", lambda: {"batches": rows})
    assert page.steps_to(3.0) == pytest.approx({512: 15.0})  # halfway from 4 to 2
    assert page.steps_to(3.25) == pytest.approx({256: 26.25, 512: 13.75})


# ------------------------------------------------------------------------------ larger runs


def test_the_larger_runs_are_comparable_with_the_first():
    for row in [*larger.record()["law"], larger.record()["again"]]:
        assert row["floor"] == page.record()["floor"]
        assert 6 * row["N"] * row["D"] == pytest.approx(row["budget"], rel=0.01)
    for row in larger.record()["sizes"]:
        assert row["D"] == 49_152_000 and row["above"][1] > 0
    assert [row["D"] for row in larger.record()["pushed"]] == [49_152_000] * 3
    assert {row["D"] for row in larger.record()["longer"]} == {147_456_000}


def test_the_name_of_a_thing_is_its_noun_and_the_adjectives_before_it():
    _, tokenizer = load_storyteller()
    weights = larger.ThingWeights(tokenizer, weight=30)
    story = "Ben saw eleven turquoise robins and took the plain brown scarf. He lost the red ball."
    labels = torch.tensor([tokenizer.encode(story)])
    named = labels[weights(labels) == 30]
    assert tokenizer.decode(named.tolist()) == " plain brown scarf red ball"
    assert weights(labels).sum() == labels.numel() + 29 * len(named)


def test_stories_prepared_once_are_read_from_their_beginnings(tmp_path):
    _, tokenizer = load_storyteller()
    tokenizer.save(tmp_path)
    texts = [write_story("easy", index=index) for index in range(12)]
    ids = [i for text in texts for i in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    for split in larger.SPLITS:
        np.save(tmp_path / f"{split}.npy", np.array(ids, np.uint16))
    data = larger.PreparedStories(tmp_path, level="easy", sequence_length=64, batch_size=2)
    data.prepare_data()
    data.setup()
    assert len(data.train_dataset) == (len(ids) - 1) // 64
    assert data.val_dataset.rows.shape == (11, 65)  # the first has no separator in front
    for row, text in zip(data.val_dataset.rows, texts[1:], strict=True):
        assert row[0] == tokenizer.eos_token_id and text.startswith(tokenizer.decode(row[1:]))
    assert 0.3 < data.floor < math.log(tokenizer.vocab_size)


def test_the_shares_of_all_kinds_are_the_whole_loss():
    model, tokenizer = load_storyteller()
    texts = [write_story("easy", seed=5, index=index) for index in range(2)]
    shares = larger.shares_by_kind(model, tokenizer, texts, "easy")
    [first, second] = Scorer(model, tokenizer).document_scores(texts)
    bits = -(first.log_prob + second.log_prob) / math.log(2) / sum(map(len, texts))
    assert sum(one.floor + one.above for one in shares.values()) == pytest.approx(bits, rel=1e-5)
    assert shares["name, known"].floor == shares["fixed"].floor == 0
    fewer = larger.shares_by_kind(model, tokenizer, texts, "easy", most=300)
    assert sum(one.tokens for one in fewer.values()) < sum(one.tokens for one in shares.values())
