"""Stories: an unambiguous grammar over a small world, exact probabilities, questions, checks."""

import hashlib
import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import pytest

from llm_course.cli import main
from llm_course.text.choices import (
    DRAWS,
    DrawingPen,
    Impossible,
    Pen,
    ReadingPen,
    Unfinished,
    all_texts,
    cards,
    draws,
    options,
)
from llm_course.text.corpus import load_corpus
from llm_course.text.data import TextDataModule
from llm_course.text.questions import check_continuation, facts, minimal_pairs, questions
from llm_course.text.scenes import tell_story
from llm_course.text.stories import (
    entropy,
    is_held_out,
    log_prob,
    read_story,
    split_stories,
    stories,
    story_documents,
    write_story,
)
from llm_course.text.wording import LEVELS, Level, Words
from llm_course.text.world import BrokenRule, Person, Place, Spot, Thing, World
from llm_course.training.sources import load_config

TINY = Level(people=2, places=1, things=1, scenes=(0, 1), distance=0, actions=1, vocabulary=1)


# ---------------------------------------------------------------- choices


def test_draws_are_the_same_everywhere():
    assert list(itertools.islice(draws(0, 0), 3)) == [741, 34562, 58157]
    many = list(itertools.islice(draws(1, 2), 1000))  # more than one block
    assert many[:256] != many[256:512] and all(0 <= draw < DRAWS for draw in many)
    assert list(itertools.islice(draws(1, 3), 5)) != many[:5]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, 251, 1000])
def test_options_count_the_draws(size):
    texts = [f"{index:04}" for index in range(size)]
    counted = Counter(texts[draw * size >> 16] for draw in range(DRAWS))
    assert {text: ways for text, (_, ways) in options(cards(*texts)).items()} == counted


def test_a_repeated_card_adds_its_chances():
    assert options(cards("a", "a", "b", "c")) == {
        "a": ("a", DRAWS // 2),
        "b": ("b", DRAWS // 4),
        "c": ("c", DRAWS // 4),
    }


@pytest.mark.parametrize(
    "deck", [cards("a", "ab"), cards("", "b"), [("a", 1), ("a", 2)], cards("b", "ab", "a")]
)
def test_a_deck_that_cannot_be_told_apart_is_refused(deck):
    with pytest.raises(ValueError, match="begins|stands for two"):
        options(deck)


def tell_sentence(pen: Pen) -> None:
    name = pen.pick("name", [("Ben", "He"), ("Eva", "She"), ("Eva", "She")], "a rule")
    pen.say(" sat. ")
    pen.recall("name", name, "the same one")
    pen.say(" ate a ")
    pen.pick("food", cards("pear", "peach", "plum"))
    pen.say(".")


def test_bits_by_character_add_up():
    pen = ReadingPen("Eva sat. She ate a peach.")
    tell_sentence(pen)
    pen.finish()
    food = pen.spans[-1]
    by_character = food.bits_by_character()
    assert by_character == pytest.approx([0, math.log2(3 / 2), 0, 1, 0], abs=1e-4)
    assert math.fsum(by_character) == pytest.approx(food.bits, abs=1e-12)
    assert pen.bits == pytest.approx(math.log2(3 / 2) + math.log2(3), abs=1e-4)


@pytest.mark.parametrize(
    "text, position, why",
    [
        ("Eva sat. He ate a pear.", 9, "the same one"),
        ("Tom sat.", 0, "a rule"),
        ("Eva sat. She ate a bear.", 19, ""),
        ("Eva sat. She ate a pear!", 23, ""),
        ("Eva sat. She ate a pear. So", 24, ""),
    ],
)
def test_the_first_impossible_place_is_named(text, position, why):
    with pytest.raises(Impossible) as caught:
        pen = ReadingPen(text)
        tell_sentence(pen)
        pen.finish()
    assert (caught.value.position, caught.value.why) == (position, why)


@pytest.mark.parametrize("length", range(len("Eva sat. She ate a peach.")))
def test_every_beginning_is_unfinished(length):
    with pytest.raises(Unfinished):
        tell_sentence(ReadingPen("Eva sat. She ate a peach."[:length]))


# ---------------------------------------------------------------- the world


def small_world():
    barn = Place("barn", "in")
    barn.spots += [Spot("in the hay", barn), Spot("behind the door", barn)]
    pond = Place("pond", "at")
    pond.spots.append(Spot("under the jetty", pond))
    world = World()
    world.places = [barn, pond]
    world.people = [Person("Eva", True, barn), Person("Ben", False, barn)]
    world.things = [Thing("kite", "red", "a small", world.people[0])]
    return world


def test_a_false_belief_lasts_until_somebody_looks_or_is_told():
    world = small_world()
    (eva, ben), (kite,), (barn, pond) = world.people, world.things, world.places
    world.put(eva, kite, barn.spots[0])
    world.go(ben, pond)
    world.take(eva, kite)
    world.put(eva, kite, barn.spots[1])
    assert world.knows(eva, kite) and ben.beliefs[kite] is barn.spots[0]
    world.go(ben, barn)
    assert not world.knows(ben, kite)  # walking in does not show it
    world.look_in_vain(ben, kite)
    assert kite not in ben.beliefs
    world.tell(eva, kite, ben)
    assert world.knows(ben, kite)
    world.go(eva, pond)
    world.go(ben, pond)
    world.carry_off(kite, barn.spots[0])
    assert not world.knows(ben, kite) and not world.knows(eva, kite)


@pytest.mark.parametrize(
    "event",
    [
        lambda w, eva, ben, kite, barn, pond: w.go(eva, barn),
        lambda w, eva, ben, kite, barn, pond: w.put(ben, kite, barn.spots[0]),
        lambda w, eva, ben, kite, barn, pond: w.put(eva, kite, pond.spots[0]),
        lambda w, eva, ben, kite, barn, pond: w.take(ben, kite),
        lambda w, eva, ben, kite, barn, pond: w.give(ben, kite, eva),
        lambda w, eva, ben, kite, barn, pond: w.give(eva, kite, eva),
        lambda w, eva, ben, kite, barn, pond: (w.go(ben, pond), w.give(eva, kite, ben)),
        lambda w, eva, ben, kite, barn, pond: w.tell(ben, kite, eva),
        lambda w, eva, ben, kite, barn, pond: w.carry_off(kite, pond.spots[0]),
        lambda w, eva, ben, kite, barn, pond: (
            w.put(eva, kite, barn.spots[0]),
            w.carry_off(kite, pond.spots[0]),
        ),
        lambda w, eva, ben, kite, barn, pond: (
            w.put(eva, kite, barn.spots[0]),
            w.look_in_vain(eva, kite),
        ),
        lambda w, eva, ben, kite, barn, pond: w.look_in_vain(ben, kite),  # no idea
        lambda w, eva, ben, kite, barn, pond: (  # thinks that Eva has it
            w.put(eva, kite, barn.spots[0]),
            w.take(eva, kite),
            w.go(ben, pond),
            w.put(eva, kite, barn.spots[1]),
            w.look_in_vain(ben, kite),
        ),
        lambda w, eva, ben, kite, barn, pond: (  # looks in the barn from the pond
            w.put(eva, kite, barn.spots[0]),
            w.go(ben, pond),
            w.take(eva, kite),
            w.look_in_vain(ben, kite),
        ),
    ],
)
def test_what_cannot_happen_is_refused(event):
    world = small_world()
    with pytest.raises(BrokenRule):
        event(world, *world.people, *world.things, *world.places)


# ---------------------------------------------------------------- the grammar


@pytest.mark.parametrize(
    "level",
    [
        TINY,
        Level(1, 2, 1, (0, 1), distance=0, actions=1, vocabulary=1),
        Level(1, 1, 1, (0, 1), distance=0, actions=2, vocabulary=1),
        Level(2, 2, 1, (0, 1), distance=0, actions=1, vocabulary=1),
    ],
    ids=["two people", "two places", "two actions", "two people and places"],
)
def test_all_stories_of_a_tiny_world(level):
    """All different, with probabilities that add up to exactly 1, and read back as they were."""
    words = Words(level)
    found = list(all_texts(lambda pen: tell_story(pen, World(), words, level)))
    assert len({text for text, _ in found}) == len(found) > 300
    assert sum(probability for _, probability in found) == Fraction(1)
    for text, probability in found[:: max(1, len(found) // 200)]:
        reader = ReadingPen(text)
        tell_story(reader, World(), words, level)
        reader.finish()
        assert reader.probability == probability


def test_drawn_stories_are_as_frequent_as_their_probabilities():
    words = Words(TINY)
    exact = dict(all_texts(lambda pen: tell_story(pen, World(), words, TINY)))
    drawn = Counter(write_story(TINY, seed=3, index=index) for index in range(4000))
    assert drawn.keys() <= exact.keys()
    common = [(text, float(p)) for text, p in exact.items() if p * 4000 > 10]
    assert len(common) > 30
    chi2 = sum((drawn[text] - 4000 * p) ** 2 / (4000 * p) for text, p in common)
    assert chi2 < len(common) + 5 * math.sqrt(2 * len(common))


@pytest.mark.parametrize("level", LEVELS)
def test_a_story_is_read_back_from_its_text(level):
    words = Words(LEVELS[level])
    for index in range(25):
        pen = DrawingPen(draws(11, index))
        world = tell_story(pen, World(), words, LEVELS[level])
        reading = read_story(pen.text, level)
        assert reading.is_whole and pen.text.isascii()
        assert log_prob(pen.text, level) == -reading.bits < 0
        assert math.fsum(reading.bits_by_character()) == pytest.approx(reading.bits, rel=1e-12)
        assert len(reading.kinds()) == len(pen.text)
        for told, read in zip(world.things, reading.world.things, strict=True):
            assert str(told.where) == str(read.where) and str(told) == str(read)
        for told, read in zip(world.people, reading.world.people, strict=True):
            assert told.place.name == read.place.name
            assert {str(thing): str(where) for thing, where in told.beliefs.items()} == {
                str(thing): str(where) for thing, where in read.beliefs.items()
            }


def test_the_text_of_a_story_never_changes():
    """What a version of the course writes for a seed is written by all later ones, too."""
    texts = [write_story(level, seed=5, index=index) for level in LEVELS for index in range(20)]
    assert hashlib.sha256("".join(texts).encode()).hexdigest()[:16] == "477aab7d49727938"


@pytest.mark.parametrize("level", LEVELS)
def test_levels_hold_what_they_promise(level):
    for index in range(10):
        world = read_story(write_story(level, seed=1, index=index), level).world
        numbers = (len(world.people), len(world.places), len(world.things))
        asked = LEVELS[level]
        assert numbers == (asked.people, asked.places, asked.things)
        assert asked.scenes[0] <= world.scene <= asked.scenes[1] + 1


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="level='huge' is unknown: choose one of 'easy', 'medium'"):
        write_story("huge")


# ---------------------------------------------------------------- any amount


def test_the_stream_does_not_depend_on_the_number_of_processes():
    alone = story_documents("easy", num_bytes=150_000, seed=4)
    assert story_documents("easy", num_bytes=150_000, seed=4, num_proc=2) == alone
    assert alone[7] == write_story("easy", seed=4, index=7)
    assert sum(map(len, alone[:-1])) < 150_000 <= sum(map(len, alone))
    assert next(stories("easy", seed=5)) != alone[0]


def test_another_interpreter_writes_the_same():
    code = (
        "from llm_course.text.stories import write_story\n"
        "print(write_story('medium', seed=8, index=3), end='')"
    )
    command = [sys.executable, "-c", code]
    for seed in ("1", "2"):  # of the order of sets
        found = subprocess.run(
            command, capture_output=True, text=True, env={"PYTHONHASHSEED": seed, "PATH": ""}
        )
        assert found.stdout == write_story("medium", seed=8, index=3), found.stderr


def test_no_story_is_on_both_sides_whatever_the_run():
    first = split_stories(story_documents("easy", num_bytes=300_000), val_fraction=0.1)
    again = story_documents("easy", num_bytes=200_000, seed=1) + first[0][:5] + first[1][:5]
    second = split_stories(again, val_fraction=0.1)
    assert not {*first[0], *second[0]} & {*first[1], *second[1]}
    assert 0.05 < len(first[1]) / len(first[0] + first[1]) < 0.2
    assert all(is_held_out(text, 0.2) for text in first[1])  # a larger share keeps them
    with pytest.raises(ValueError, match="1 stories are too few to hold out 0.1 of them"):
        split_stories(["one"], val_fraction=0.1)


def test_the_entropy_has_an_error_that_holds():
    found = [entropy("easy", num_stories=40, seed=seed) for seed in range(2)]
    difference = abs(found[0].bits_per_byte - found[1].bits_per_byte)
    assert difference < 4 * math.hypot(found[0].standard_error, found[1].standard_error)
    shares = found[0].by_kind
    assert math.fsum(bits for bits, _ in shares.values()) == pytest.approx(found[0].bits_per_byte)
    assert math.fsum(size for _, size in shares.values()) == pytest.approx(1)
    assert all(shares[kind][0] == 0 for kind in shares if kind == "fixed" or "known" in kind)


# ---------------------------------------------------------------- questions


def test_answers_agree_with_the_world_and_with_each_other():
    kinds = Counter()
    for index in range(20):
        world = read_story(write_story("hard", seed=6, index=index), "hard").world
        asked = {question.text: question for question in questions(world)}
        kinds.update(question.kind for question in asked.values())
        true = {fact.true for fact in facts(world)}
        assert not true & {fact.false for fact in facts(world)}
        for thing in world.things:
            where = asked[f"Where is the {thing.noun}?"]
            assert where.answer in true
            for person in world.people:
                knows = asked[f"Does {person} know where the {thing.noun} is?"].answer
                thinks = asked.get(f"Where does {person} think that the {thing.noun} is?")
                if thinks is not None:
                    assert (knows == "Yes.") == (thinks.answer == where.answer)
    assert min(kinds[k] for k in ("giver", "thinks", "knows", "where is it", "colour")) > 20


def test_an_answer_is_compared_as_a_whole():
    question = next(q for q in questions(read_story(write_story()).world) if q.kind == "colour")
    assert question.is_right(question.answer) and question.is_right(f"  {question.answer[:-1]}\n")
    assert not question.is_right(f"{question.answer} Or not.") and not question.is_right("")


def test_a_broken_story_is_refused_at_its_wrong_word():
    rules = Counter()
    for index in range(6):
        story = write_story("medium", seed=9, index=index)
        pairs = minimal_pairs(story)
        rules.update(pair.rule for pair in pairs)
        for pair in pairs[index::4]:
            assert pair.kept == story != pair.broken
            verdict = check_continuation(pair.before, pair.wrong + pair.after)
            assert not verdict.is_possible and verdict.fault == "rule", (pair, verdict)
            assert verdict.characters == 0 and pair.rule in verdict.message
    assert len(rules) > 8


def test_every_cut_of_a_story_can_go_on():
    story = write_story("easy", seed=2, index=1)
    for cut in range(0, len(story), 37):
        assert check_continuation(story[:cut], story[cut:], "easy")[:3] == (
            True,
            True,
            len(story) - cut,
        )
        half = check_continuation(story[:cut], story[cut : cut + 20], "easy")
        assert half.is_possible


def test_nonsense_is_refused_without_complaint():
    story = write_story("easy", seed=2, index=1)
    start = story[: story.index("\n\n", 500) + 2]
    rng = random.Random(0)
    for text in ("\0", "é" * 50, "😀", " " * 1000, "\n" * 9, "{animal}", story, "a" * 100_000):
        verdict = check_continuation(start, text, "easy")
        assert not verdict.is_possible and verdict.message
    for _ in range(200):
        noise = "".join(chr(rng.randrange(1, 300)) for _ in range(20))
        assert not check_continuation(start, noise, "easy").is_possible
    assert check_continuation(start, "", "easy").is_possible
    assert check_continuation(start, story[len(start) :] + "!", "easy").fault == "words"
    with pytest.raises(ValueError, match="expected"):
        check_continuation("It was a dark and stormy night.", "", "easy")


# ---------------------------------------------------------------- in a run


def test_the_corpus_of_stories(tmp_path):
    corpus = load_corpus("stories", stories={"level": "easy", "num_bytes": 60_000, "seed": 3})
    assert corpus.documents == story_documents("easy", num_bytes=60_000, seed=3)
    assert corpus.source == "stories (level easy, num_bytes 60000, seed 3)"
    data = TextDataModule(
        tmp_path,
        corpus="stories",
        stories={"level": "easy", "num_bytes": 60_000},
        vocab_size=400,
        sequence_length=32,
        val_fraction=0.2,
    )
    data.prepare_data()
    data.setup()
    held_out = [
        text for text in story_documents("easy", num_bytes=60_000) if is_held_out(text, 0.2)
    ]
    assert data.info["documents"]["val"] == len(held_out)
    assert data.info["bytes"]["val"] == sum(map(len, held_out))


def test_a_run_on_stories(tmp_path, capsys):
    words = f"""--run-dir {tmp_path / "run"} --data.corpus stories --data.stories.level easy
        --data.stories.num_bytes 100000 --data.vocab_size 400 --data.sequence_length 32
        --model.hidden_size 16 --model.num_layers 1 --model.num_heads 2 --training.max_steps 3
        --training.batch_size 2 --logging.progress false --logging.tensorboard false
        --training.device cpu""".split()
    assert main(["train", *words]) == 0
    info = json.loads((tmp_path / "run" / "data" / "info.json").read_text())
    assert info["source"] == "stories (level easy, num_bytes 100000, seed 0)"
    config, _ = load_config([f"--config={tmp_path / 'run' / 'config.yaml'}"], use_environment=False)
    assert config.data.stories.level == "easy" and config.data.stories.num_bytes == 100_000


@pytest.mark.parametrize(
    "word, match",
    [
        ("--data.stories.level=huge", "data.stories.level=huge must be easy or medium or hard"),
        ("--data.stories.num_bytes=0", "data.stories.num_bytes=0 must be positive"),
        ("--data.stories.seed=-1", "data.stories.seed=-1 must be"),
    ],
)
def test_bad_settings_are_named(word, match):
    with pytest.raises(ValueError, match=match):
        load_config([word], use_environment=False)
