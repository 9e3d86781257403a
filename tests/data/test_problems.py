"""Order, evaluation split, templates, demonstrations: of Source over entries made here and over reasoning_gym."""

import pytest

from hybridflow.data.problems import DataError, Entry, Source, Templates
from hybridflow.data.reasoning import ReasoningGym
from hybridflow.data.tokenizer import TEXT, character_tokenizer


class Sums:
    """Entry i asks i // repeats + 1, so every question occurs `repeats` times."""

    name = "sums"

    def __init__(self, size, repeats=1):
        self.size, self.repeats = size, repeats

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        n = index // self.repeats
        return Entry(f"{n}+1", str(n + 1), {"n": n})


def source(size=50, repeats=1, tokenizer=None, templates=None, limit=100, **options):
    return Source(Sums(size, repeats), tokenizer or character_tokenizer(TEXT), templates or Templates(), limit, **options)


def questions(problems):
    return [problem.question for problem in problems]


def test_an_epoch_visits_everything_once_and_epochs_differ():
    problems, position = source(seed=3).take(0, 100)
    assert position == 100
    assert sorted(questions(problems[:50])) == sorted(questions(problems[50:])) == sorted(f"{n}+1" for n in range(50))
    assert questions(problems[:50]) != questions(problems[50:])
    assert [problem.index for problem in problems] == list(range(100))


def test_one_integer_resumes_the_order():
    whole, _ = source(evaluation_problems=7, seed=1).take(0, 90)
    first = source(evaluation_problems=7, seed=1)
    parts, position = [], 0
    for count in (1, 30, 20):
        taken, position = first.take(position, count)
        parts += taken
    rest, _ = source(evaluation_problems=7, seed=1).take(position, 39)
    assert parts + rest == whole
    assert questions(source(seed=2).take(0, 50)[0]) != questions(source(seed=1).take(0, 50)[0])


def test_evaluation_is_fixed_distinct_and_never_in_training():
    one, two = source(60, 3, evaluation_problems=8, seed=5), source(60, 3, evaluation_problems=8, seed=5)
    assert one.evaluation == two.evaluation
    held_out = set(questions(one.evaluation))
    assert len(held_out) == 8 and [problem.index for problem in one.evaluation] == list(range(8))
    trained, position = one.take(0, 2 * 36)  # 12 other questions, 3 times each, in 2 epochs
    assert position <= 120 and not held_out & set(questions(trained))
    assert len(set(questions(trained))) == 12
    assert set(questions(source(60, 3, evaluation_problems=8, seed=6).evaluation)) != held_out


def test_equal_prompts_of_unequal_questions_are_held_out_too():
    held = source(20, templates=Templates(prompt="{question[0]}"), evaluation_problems=1)  # 1+1, 10+1, 11+1 ... look the same
    prompt = held.evaluation[0].prompt
    assert prompt not in {problem.prompt for problem in held.take(0, 8)[0]}


def test_long_prompts_are_dropped_and_counted():
    short = source(20, limit=3)  # "10+1" and above have 4 characters
    problems, position = short.take(0, 10)
    assert sorted(questions(problems)) == [f"{n}+1" for n in range(10)]
    assert short.dropped == position - 10 <= 10
    with pytest.raises(DataError, match="none of 20 problems is left .* sampling.max_prompt_tokens=2"):
        source(20, limit=2).take(0, 1)


def test_errors_of_the_split():
    with pytest.raises(DataError, match="sums has 20 distinct questions .* fewer than evaluation.problems=21"):
        source(60, 3, evaluation_problems=21)
    with pytest.raises(DataError, match="none of 60 problems is left for training: 20 questions"):
        source(60, 3, evaluation_problems=20).take(0, 1)
    with pytest.raises(DataError, match="sums holds no problems"):
        source(0)


def test_prompt_templates_fill_in_metadata():
    problem = source(templates=Templates(prompt="{n} and 1: {question}=")).take(0, 1)[0][0]
    n = problem.metadata["n"]
    assert problem.prompt == f"{n} and 1: {n}+1=" and problem.question == f"{n}+1"
    assert character_tokenizer(TEXT).decode(problem.prompt_tokens) == problem.prompt
    with pytest.raises(DataError, match=r"data.prompt_template='\{m\}=' has no field 'm' .*\['answer', 'n', 'question'\]"):
        source(templates=Templates(prompt="{m}=")).take(0, 1)
    with pytest.raises(DataError, match="data.prompt_template='{' is not a valid format string"):
        source(templates=Templates(prompt="{")).take(0, 1)
    with pytest.raises(DataError, match=r"no token for \['€'\] .* data.prompt_template"):
        source(templates=Templates(prompt="€{question}")).take(0, 1)


def test_chat_template_and_system_prompt():
    tokenizer = character_tokenizer(TEXT)
    with pytest.raises(DataError, match="data.system_prompt needs a chat template"):
        source(templates=Templates(system="be brief")).take(0, 1)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot: {% endif %}"
    )
    problem = source(tokenizer=tokenizer, templates=Templates(system="be brief")).take(0, 1)[0][0]
    assert problem.prompt == f"system: be brief\nuser: {problem.question}\nbot: "
    assert tokenizer.decode(problem.prompt_tokens) == problem.prompt
    assert source(tokenizer=tokenizer).take(0, 1)[0][0].prompt == f"user: {problem.question}\nbot: "


def test_demonstrations_end_the_text_and_are_right_as_often_as_asked():
    tokenizer = character_tokenizer(TEXT)
    right = source(templates=Templates(response="so {answer}"))
    problem = right.take(0, 1)[0][0]
    demonstration = right.demonstration(problem)
    assert demonstration[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(demonstration[:-1]) == f"so {problem.answer}"

    weak, again = source(1000, correct_fraction=0.4, limit=9), source(1000, correct_fraction=0.4, limit=9)
    problems, _ = weak.take(0, 2000)
    texts = [tokenizer.decode(weak.demonstration(problem)[:-1]) for problem in problems]
    correct = [text == problem.answer for text, problem in zip(texts, problems, strict=True)]
    overshot = [text == f"{problem.answer}+1" for text, problem in zip(texts, problems, strict=True)]
    assert all(a != b for a, b in zip(correct, overshot, strict=True))
    assert sum(correct) / 2000 == pytest.approx(0.4, abs=0.04)
    assert correct[:1000] != correct[1000:]
    assert texts == [tokenizer.decode(again.demonstration(problem)[:-1]) for problem in problems]


def test_reasoning_gym_problems():
    entries = ReasoningGym("chain_sum", {"min_terms": 3, "max_terms": 3, "max_digits": 1, "size": 500}, seed=4)
    templates = Templates(prompt="{expression} =")
    gym = Source(entries, character_tokenizer(), templates, 16, evaluation_problems=64, seed=4)
    problems, _ = gym.take(0, 500)
    for problem in [*problems, *gym.evaluation]:
        assert eval(problem.prompt[:-1]) == int(problem.answer)
        assert problem.question == f"State the final answer to the following arithmetic problem: {problem.prompt}"
        assert len(problem.prompt_tokens) == 6  # spaces are dropped
    assert not set(questions(problems)) & set(questions(gym.evaluation))
    other = ReasoningGym("chain_sum", {"min_terms": 3, "max_terms": 3, "max_digits": 1, "size": 500}, seed=5)
    assert [entries[i] for i in range(9)] != [other[i] for i in range(9)]


def test_reasoning_gym_errors():
    with pytest.raises(DataError, match="data.task='chain_sums' is no task of reasoning_gym: did you mean .*chain_sum"):
        ReasoningGym("chain_sums", {}, 0)
    with pytest.raises(DataError, match="data.options.max_term is not an option of chain_sum: there are .*max_terms"):
        ReasoningGym("chain_sum", {"max_term": 3}, 0)
    with pytest.raises(DataError, match="max_terms must be >= min_terms"):
        ReasoningGym("chain_sum", {"max_terms": 1}, 0)
    with pytest.raises(DataError, match="data.options.seed is not an option of chain_sum: set data.seed"):
        ReasoningGym("chain_sum", {"seed": 1}, 0)


def test_a_fraction_is_checked():
    with pytest.raises(DataError, match="warm_start.correct_fraction=1.5 must lie between 0 and 1"):
        source(correct_fraction=1.5)
