"""Structured output: the text follows its grammar, and drafting does not change it."""

from __future__ import annotations

import functools
import json
import multiprocessing
import random
import resource
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import Any

import pytest
import torch

from engine.accept import Lossless, VerifiedTree
from engine.config import Sampling
from engine.constraint import GrammarConstraint, allowed_after, build_constraint
from engine.errors import ConfigError, TargetError
from engine.grammar import MAX_CHARS, Matcher, compile_grammar
from engine.model.audit import audit
from engine.model.target import Target
from engine.proposal import DraftDists, ExtraRows, Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.steps import Step
from engine.tree import TreeShape
from tests.engine.drafters.judges import write
from tests.engine.methods import drafter_for
from tests.engine.scripted import (
    ALPHA,
    Pair,
    Parents,
    chi_square,
    draw_tree,
    first_two_tokens,
    law_of_two,
    random_logits,
    random_parents,
)
from tests.models import VOCAB, tiny_model, tiny_target

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"enum": ["yes", "no"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["ok", "n", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " {0,2}"},  # a random model likes blanks
}
REGEX = "(ab|ba|[cd]{2}){6,9}!"
SAMPLINGS = {
    "json_schema": Sampling(structured_output="json_schema", grammar=json.dumps(SCHEMA)),
    "regex": Sampling(structured_output="regex", grammar=REGEX),
    "grammar": Sampling(structured_output="grammar", grammar='start: "x" ("yy" | "zz"){8} "."'),
}
METHODS = [
    *("plain", "ngram", "suffix", "recycling", "lookahead", "combined", "draft-model"),
    *("medusa", "redrafter", "eagle", "eagle3"),
]


@functools.cache
def target() -> Target:
    return tiny_target("llama", eos_token_id=None)


@functools.cache
def prompt_ids() -> list[int]:
    return target().encode("Is it ready? " * 3)


def matcher_after(sampling: Sampling, tokens: list[int]) -> Matcher:
    grammar = compile_grammar(sampling.structured_output, sampling.grammar)
    matcher = Matcher(target().token_texts, grammar)
    for token in tokens:
        matcher.advance(token)
    return matcher


@functools.cache
def expected(kind: str) -> list[int]:
    """Token by token: transformers' forward over the whole text, and a matcher that begins anew."""
    output: list[int] = []
    while not output or output[-1] not in target().eos_ids:
        allowed = torch.from_numpy(matcher_after(SAMPLINGS[kind], output).allowed())
        with torch.inference_mode():
            logits = target().model(torch.tensor([prompt_ids() + output])).logits[0, -1]
        output.append(int(logits.masked_fill(~allowed, -torch.inf).argmax()))
        assert len(output) < 150
    return output


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_equals_the_target_held_to_its_grammar(kind: str, method: str) -> None:
    drafter = drafter_for(target(), method)
    for _ in "12":  # a drafter writes text after text
        text = write(target(), drafter, prompt_ids(), sampling=SAMPLINGS[kind], tokens=150)
        assert text.output == expected(kind)
        assert text.end.finish_reason == "eos"
        check_forced(text.steps, kind, method)
        num_cut = sum(step.num_cut for step in text.steps)
        assert text.metrics.num_cut == num_cut and (num_cut or method != "recycling")


def check_forced(steps: list[Step], kind: str, method: str) -> None:
    """Where one token only may follow, it is drafted, and accepted wherever it is reached."""
    for step in steps:
        reached = {0, *step.accepted}
        for node in range(len(step.tokens) - step.num_forced, len(step.tokens)):
            assert step.target_probs[node] == 1.0
            assert (step.parents[node] in reached) == (node in step.accepted)
    forced = sum(step.num_forced for step in steps)
    assert forced == 0 if method == "plain" else forced > 0 or kind == "regex"


# ---- the masks of a tree


def test_every_node_is_masked_by_its_own_path_alone() -> None:
    """Against a matcher that begins anew for every node, on random trees of likely tokens."""
    sampling, rng = SAMPLINGS["regex"], random.Random(0)
    letters = [target().encode(letter)[0] for letter in "abcd!"]
    kept = 0
    for seed in range(30):
        begun = expected("regex")[: rng.randrange(1, 6)]
        shape = TreeShape(random_parents(rng, 16))
        tokens = [begun[-1]] * 16
        for children in shape.children:
            for child, token in zip(children, rng.sample(range(VOCAB), 16), strict=False):
                tokens[child] = token
            for child, token in zip(children, rng.sample(letters, 5), strict=False):
                tokens[child] = token
        proposal = Proposal(torch.tensor(tokens), shape)
        constraint = build_constraint(target(), sampling)
        constraint.commit(begun)
        pruned = constraint.prune(proposal, max_depth=9)
        logits = torch.zeros(len(pruned.shape), VOCAB)
        masked = constraint.mask(TargetOutput(logits)).logits
        tokens = pruned.tokens.tolist()
        kept += len(tokens) - 1
        for node in range(len(tokens)):
            path = [tokens[i] for i in pruned.shape.path_to(node)]
            right = torch.from_numpy(matcher_after(sampling, [*begun, *path]).allowed())
            assert torch.equal(masked[node].isfinite(), right), (seed, node)
    assert kept > 50


def test_extra_rows_lose_the_columns_of_nodes_that_went() -> None:
    visible = torch.tensor([[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]).bool()
    extra = ExtraRows(torch.tensor([8, 9]), torch.tensor([1, 2]), visible, 2)
    proposal = Proposal(torch.tensor([5, 6, 7]), TreeShape([-1, 0, 0]), extra=extra)
    kept = proposal.keep([0, 2])
    assert kept.extra is not None
    assert kept.extra.visible.tolist() == [[True, False, True, False], [True, False, True, True]]
    tokens, _, among = kept.rows()
    assert tokens.tolist() == [5, 7, 8, 9] and among.shape == (4, 4)


def test_an_audit_looks_at_what_the_grammar_allows() -> None:
    """Where it parts, the target's likeliest token of all may be forbidden."""
    sampling, plain = SAMPLINGS["grammar"], expected("grammar")
    y, z = (target().encode(letter)[0] for letter in "yz")
    at = next(i for i, token in enumerate(plain) if token in (y, z))
    rival = z if plain[at] == y else y
    free = audit(target(), prompt_ids(), plain, [*plain[:at], rival])
    allowed = partial(allowed_after, target(), sampling)
    held = audit(target(), prompt_ids(), plain, [*plain[:at], rival], allowed=allowed)
    assert held is not None and free is not None and free.view.own_rank > 2
    assert (held.view.best, held.view.second) == (held.plain_token, held.own_token)
    assert held.view.own_rank == 2


# ---- sampling

LETTERS = "abcde"
PAIRS = ("abd ade", "abd e", "b ade")
"""Letters that may come first, and after it; where there is one, the grammar drafts it."""


def ids_of(letters: str) -> list[int]:
    return [target().encode(letter)[0] for letter in letters]


def over_vocabulary(path: tuple[int, ...], seed: int, rest: float) -> torch.Tensor:
    """Logits of the letters at random, of all other tokens the same."""
    logits = torch.full((VOCAB,), rest)
    logits[ids_of(LETTERS)] = 1.5 * random_logits(path, len(LETTERS), seed=seed)
    return logits


def target_logits(path: tuple[int, ...]) -> torch.Tensor:
    return over_vocabulary(path, 17, 1.0)


def draft_law(path: tuple[int, ...]) -> torch.Tensor:
    return over_vocabulary(path, 9006, -torch.inf).mul(1.5).softmax(-1)


@pytest.mark.parametrize(
    ("parents", "certain", "letters"),
    [
        *((parents, c, PAIRS[0]) for parents in ([-1, 0, 1], [-1, 0, 0, 0, 1, 1]) for c in (0, 1)),
        *(([-1, 0, 0, 0, 1, 1], 0, letters) for letters in PAIRS[1:]),
    ],
)
@pytest.mark.slow
def test_samples_keep_the_law_of_the_target_held_to_its_grammar(
    parents: Parents, certain: int, letters: str
) -> None:
    firsts, seconds = letters.split()
    draws, seen, sampling = SeededDraws(3), Counter[Pair](), Sampling(temperature=1.0)
    grammar, tree = compile_grammar("regex", f"[{firsts}][{seconds}]"), TreeShape(parents)
    for _ in range(1000):
        constraint = GrammarConstraint(Matcher(target().token_texts, grammar), target().eos_ids)
        tokens, dists = draw_tree(tree, draft_law, 0, draws.generator, likeliest=bool(certain))
        proposal = Proposal(torch.tensor(tokens), tree, dists=dists)
        rule = Lossless(sampling)
        pair = first_two_tokens(proposal, target_logits, rule, sampling, draws, constraint)
        seen[pair] += 1
    law = law_of_two(target_logits, sampling, ids_of(firsts), ids_of(seconds))
    assert chi_square(seen, law) > ALPHA


@pytest.mark.slow
def test_a_token_that_forces_the_next_is_not_drawn_more_often() -> None:
    """Where `c` is drafted, `d` is forced; the other chains are sampled as a whole."""
    a, b, c, _, e = ids_of(LETTERS)
    laws = {  # of the target and the draft, by the length of the text
        0: ({a: 0.4, b: 0.6}, {a: 0.8, b: 0.2}),
        1: ({c: 0.1, e: 0.9}, {c: 0.9, e: 0.1}),
        2: ({a: 0.5, b: 0.5}, {a: 0.5, b: 0.5}),
    }

    def law(length: int, *, draft: bool) -> torch.Tensor:
        masses = torch.full((VOCAB,), 0.0 if draft else 1e-9)
        for token, mass in laws.get(length, laws[2])[draft].items():
            masses[token] = mass
        return masses

    sampling = Sampling(temperature=1.0, structured_output="regex", grammar="[ab](cd|e[ab])[ab]+")
    rule, draws, shape = Lossless(sampling), SeededDraws(1), TreeShape.chain(3)
    seen, rows = Counter[int](), {i: i for i in range(3)}
    dists = DraftDists(torch.stack([law(i, draft=True) for i in range(3)]), rows)
    for _ in range(4000):
        tokens = torch.tensor([0, *(draws.pick(probs) for probs in dists.probs)])
        constraint = build_constraint(target(), sampling)
        proposal = constraint.prune(Proposal(tokens, shape, dists=dists), max_depth=9)
        depths = proposal.shape.depths.tolist()
        logits = torch.stack([law(depth, draft=False) for depth in depths]).log()
        output = constraint.mask(TargetOutput(logits))
        accepted = rule(VerifiedTree.of(proposal, output, rule, draws), draws)
        path = (*accepted.path, None)
        seen[accepted.next_token if path[0] is None else int(proposal.tokens[path[0]])] += 1
    assert chi_square(seen, {a: 0.4, b: 0.6}) > ALPHA


# ---- what people write


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", '{"type": "objec"}', "Invalid type: objec"),
        ("json_schema", "{", "JSON schema"),
        ("json_schema", '{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "integer", "multipleOf": 99999989}', "at most 65535"),
        ("json_schema", '{"type": "number", "multipleOf": 9999.9989}', "at most 65535"),
        ("json_schema", '{"multiple\\u004ff": 99999989, "type": "integer"}', "at most 65535"),
        ("json_schema", '{"allOf": [{"multipleOf": 997}, {"multipleOf": 0.01}]}', "997, 0.01"),
        ("grammar", 'start: %json {"multipleOf": 99999989} // "multipleOf": 0', "at most 65535"),
        ("grammar", "\n" * MAX_CHARS, "got nothing"),
        ("grammar", "\n" * (MAX_CHARS - 1) + "#", "root"),
        ("regex", "(", "unclosed group"),
        ("regex", " ", "got nothing"),
        ("grammar", "start: other", "unknown name"),
        ("grammar", "start: " + "(" * 9999 + '"a"' + ")" * 9999, "too deeply nested"),
    ],
)
def test_a_bad_grammar_is_one_sentence_at_its_setting(kind: str, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        Sampling.parse({"structured_output": kind, "grammar": text})
    assert set(refused.value.faults) == {"grammar"}
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


DIVISORS = {f"{n}": {"type": "integer", "multipleOf": n} for n in range(1, 55441) if 55440 % n == 0}
NESTED = {f"{i}": {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(24)}
BOMBS: list[tuple[str, Any]] = [
    ("json_schema", {"type": "integer", "multipleOf": 99999989}),
    ("json_schema", {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]}),
    ("json_schema", {"type": "integer", "multipleOf": 65521}),
    ("json_schema", {"type": "object", "properties": DIVISORS}),
    ("json_schema", {"$defs": {**NESTED, "24": {"type": "integer"}}, "$ref": "#/$defs/0"}),
    ("json_schema", {"type": "array", "minItems": 10**6, "maxItems": 10**9}),
    ("json_schema", {"type": "string", "minLength": 10**5, "maxLength": 10**6}),
    ("json_schema", {"enum": [f"v{i}" for i in range(9000)]}),
    ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    ("regex", "x{100000000}"),
    ("regex", "(.|\n)*(a|e|i).{24}(o|u|x).{11}"),
    ("grammar", "start: A\nA: " + " & ".join(f"/(.*{c}.{{12}}.*)/" for c in "abcdefgh")),
    ("grammar", 'start: e\ne: "" | e e | e e e | /[a-z]/ | /[^,]/ | /./'),
    ("grammar", "\n" * (MAX_CHARS - 12) + 'root ::= "a"'),
]


def write_within_limits(done: SimpleQueue[int]) -> None:
    """A text of each; the system ends this process where one takes ten seconds of work."""
    usage = functools.partial(resource.getrusage, resource.RUSAGE_SELF)
    _ = target().token_texts
    for i, (kind, grammar) in enumerate(BOMBS):
        resource.setrlimit(resource.RLIMIT_CPU, (int(sum(usage()[:2])) + 10, -1))
        text = grammar if isinstance(grammar, str) else json.dumps(grammar)
        before = usage().ru_maxrss
        with suppress(ConfigError, TargetError):
            sampling = Sampling.parse({"structured_output": kind, "grammar": text})
            constraint = build_constraint(target(), sampling)
            for _ in range(100):
                logits = constraint.mask(TargetOutput(torch.zeros(1, VOCAB))).logits[0]
                constraint.commit([int(logits.argmax())])
        assert usage().ru_maxrss - before < 2**19, "half a gigabyte"
        done.put(i)


@pytest.mark.slow
def test_no_grammar_takes_the_engine_long_or_much_memory() -> None:
    context = multiprocessing.get_context("spawn")
    done = context.SimpleQueue()
    process = context.Process(target=write_within_limits, args=(done,))
    process.start()
    process.join()
    ended = []
    while not done.empty():
        ended.append(BOMBS[done.get()])
    assert BOMBS[len(ended) :] == []
    assert process.exitcode == 0


def test_without_the_library_the_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install llguidance"):
        Sampling.parse({"structured_output": "regex", "grammar": "never compiled before"})


def test_a_target_without_tokenizer_says_that_it_cannot_follow() -> None:
    bare = Target(tiny_model("llama"), None, name="bare")
    with pytest.raises(TargetError, match="needs a target with a tokenizer"):
        build_constraint(bare, SAMPLINGS["regex"])
