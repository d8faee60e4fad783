"""What students learn from is what their drafters are shown."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafters.eagle.head import HeadEntries
from engine.drafters.heads.layer import HeadCache
from engine.drafters.heads.redrafter import read_head
from engine.drafters.heads.vocabulary import Vocabulary
from engine.model.corpus import Corpus, Entry
from engine.model.forward import decoder_of
from engine.model.logits import LogitTransform
from engine.model.target import Target
from engine.proposal import Needs
from engine.training.losses import NUM_RANKS, LMHead, LossOutput, Prediction, TopProbs
from engine.training.methods import METHODS, training_settings
from engine.training.methods.eagle import new_eagle1_head, new_eagle3_head
from engine.training.methods.eagle_unroll import unroll
from engine.training.packs import Pack, Teacher, frequent_tokens, make_packs, split_held_out
from engine.tuning.costs import Costs
from engine.tuning.latency import LatencyCurve
from tests.engine.drafters.judges import slow, write
from tests.models import VOCAB, build_context, plain_greedy, tiny_target

LAYERS = (2, 4, 5)


def pack_loss(
    target: Target,
    corpus: Corpus,
    method: str,
    entries: Sequence[Entry],
    generator: torch.Generator | None,
    *,
    length: int = 0,
    **settings: Any,
) -> LossOutput:
    """A fresh student's loss on one pack of these dialogues."""
    torch.manual_seed(0)
    student = training_settings(method, settings).student(target, corpus.entries)
    teacher = Teacher(target, corpus, student.target_layers, student.vocabulary)
    pack = teacher.read(entries, length=length)
    assert len(pack.tokens) >= length
    return student.compute_loss(pack, generator)


def read(target: Target, corpus: Corpus) -> Pack:
    """The first three dialogues."""
    everything = Vocabulary(None, target.vocab_size)
    teacher = Teacher(target, corpus, LAYERS, everything)
    pack = teacher.read(corpus.entries[:3])
    return pack


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("", ""),
        ("gemma3_text", "sliding_attention"),
        ("qwen3_5_text", "linear_attention"),
        ("llama4_text", "chunked_attention"),
    ],
)
def test_dialogues_of_a_pack_do_not_see_each_other(
    family: str, kind: str, target: Target, corpus: Corpus
) -> None:
    """By full attention, in a window, by a state that goes on, and where layers count rows."""
    if family:
        kinds = [kind] * 7 + ["full_attention"]
        more: dict[str, Any] = {"layer_types": kinds}
        if family == "llama4_text":
            more["no_rope_layers"] = [1] * 7 + [0]
        target = tiny_target(family, num_hidden_layers=8, **more)
    pack = read(target, corpus)
    start = 0
    for entry in corpus.entries[:3]:
        ids = entry.token_ids.tolist()
        shown = target.prefill(ids, target.new_cache(64), Needs(hidden=True, layers=LAYERS))
        rows = slice(start, start + entry.length)
        assert pack.layers is not None and shown.hidden is not None and shown.layers is not None
        torch.testing.assert_close(pack.hidden[rows], shown.hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pack.layers[rows], shown.layers, atol=1e-4, rtol=1e-4)
        assert pack.positions[rows].tolist() == list(range(entry.length))
        start += entry.length
        best, likely = shown.logits[-1].float().softmax(dim=-1).topk(16), pack.teacher
        assert set(likely.indices[start - 1].tolist()) == set(best.indices.tolist())
        probs = best.values / best.values.sum()
        torch.testing.assert_close(likely.probs[start - 1], probs, atol=1e-4, rtol=1e-3)


def test_only_answers_count_in_the_loss(target: Target, corpus: Corpus) -> None:
    """Of the row's own dialogue: what comes next in the pack is another's."""
    pack, wanted, begin = read(target, corpus), list[int](), 0
    for entry in corpus.entries[:3]:
        wanted += [begin + i for start, end in entry.spans for i in range(start, end)]
        begin += entry.length
    assert pack.loss_mask.nonzero()[:, 0].tolist() == wanted
    for offset in (1, 2, 40):
        reached = [i for i in wanted if pack.positions[i] >= offset]
        assert (pack.rows_before(offset) + offset).tolist() == reached


@pytest.mark.parametrize("version", [1, 3])
def test_unrolling_in_training_is_what_the_drafter_does(
    version: int, target: Target, corpus: Corpus
) -> None:
    torch.manual_seed(1)
    if version == 1:
        head: Any = new_eagle1_head(target)
    else:
        head = new_eagle3_head(target, torch.arange(100))
    # Attention and MLP begin at zero, which would hide a wrong mask.
    torch.nn.init.normal_(head.layer.o_proj.weight, std=0.3)
    torch.nn.init.normal_(head.layer.down_proj.weight, std=0.3)
    pack = read(target, corpus)
    assert pack.layers is not None
    features = pack.hidden if version == 1 else pack.layers
    fused = head.fuse(features)
    starts = torch.arange(1, len(pack.tokens), 2)
    depths = [out.detach() for _, out in unroll(head, fused, pack, 4, starts)]
    # The second dialogue of the pack: what lies before it must not matter.
    start, length = corpus.entries[0].length, corpus.entries[1].length
    tokens = pack.tokens[start : start + length]
    for root in (4 - start % 2, length - 6 - (start + length) % 2):
        session = HeadEntries(head, HeadCache(1))
        session.feed_base(features[start : start + root], tokens[1 : root + 1])
        hidden = session.output
        for depth in range(4):
            if depth:
                fed = tokens[root + depth][None]
                hidden, _ = session.expand(hidden, fed, depth, None)
            entry = start + root - 1
            row = entry if depth == 0 else starts.tolist().index(entry)
            torch.testing.assert_close(depths[depth][row], hidden[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "exit_dim"), [("llama", 32), ("llama", 64), ("gemma3_text", 32)]
)
def test_a_recurrent_head_computes_what_was_trained(
    family: str, exit_dim: int, tmp_path: Path
) -> None:
    """Also where its output is as wide as its input, and where the target scales embeddings."""
    target, n = tiny_target(family), 12
    student = training_settings("redrafter", {"exit_dim": exit_dim}).student(target, [])
    student.save(tmp_path, "float32")
    head = read_head(str(tmp_path), target)
    tokens, hidden = torch.arange(n) + 5, torch.randn(n, target.hidden_size)
    whole, likely = torch.ones(n).bool(), TopProbs(tokens[:, None], torch.ones(n, 1))
    pack = Pack(tokens, torch.arange(n), torch.zeros(n).long(), whole, hidden, None, likely, n)
    learnt = next(student.predictions(pack, None))
    state = head.advance(torch.zeros(n - 2, target.hidden_size), tokens[1:-1])
    expected = head.logits(hidden[:-2], state)
    found = learnt.lm_head(learnt.hidden)[: n - 2]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3_text", "granite", "stablelm"])
def test_an_untrained_head_reads_its_deepest_layer_as_the_target_would(family: str) -> None:
    """Also where a norm's weights are stored with an offset, and where logits are multiplied."""
    scale: dict[str, Any] = {"logits_scaling": 4.0} if family == "granite" else {}
    target = tiny_target(family, num_hidden_layers=8, layer_types=None, **scale)
    norm: Any = decoder_of(target.model).get_submodule("norm")
    norm.weight.uniform_(0.5, 2.0)
    ids, hidden = torch.arange(100), torch.randn(4, target.hidden_size)
    hidden -= hidden.mean(dim=-1, keepdim=True)  # as StableLM's norm does
    logits = LogitTransform.of(target.config)(target.output(norm(hidden)))
    head = new_eagle3_head(target, ids)
    torch.testing.assert_close(head.logits(hidden), logits[:, ids], atol=1e-3, rtol=1e-3)
    student: Any = training_settings("redrafter", {"exit_dim": 64}).student(target, [])
    product = LogitTransform.of(target.config)(target.output(hidden))
    torch.testing.assert_close(student.output(torch.cat([hidden, 0 * hidden], -1)), product)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "redrafter"])
def test_heads_fit_a_target_whose_layers_are_wider_than_its_embedding(
    method: str, tmp_path: Path
) -> None:
    """As OPT 350M's."""
    target = tiny_target("opt", num_hidden_layers=8, word_embed_proj_dim=16)
    settings = training_settings(method, {"weights_dtype": "float32"})
    student = settings.student(target, [])
    student.save(tmp_path, "float32")
    rates = [[1.0]] * student.depths
    drafter = settings.decoding(tmp_path, rates).build(build_context(target))
    assert write(target, drafter, [7, 8, 9], tokens=8).output == plain_greedy(target, [7, 8, 9], 8)
    Costs(LatencyCurve((1, 2), (1.0, 1.0))).time_drafts(drafter, target)


def test_a_draft_model_has_the_tokens_that_have_logits() -> None:
    target = tiny_target("inkling2_text")
    student: Any = training_settings("draft_target", {}).student(target, [])
    assert len(student.published()["model.embed_tokens.weight"]) == target.vocab_size == VOCAB - 4


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_fewer_chains_judge_fewer_rows_beyond_the_first_depth(
    method: str, target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.training.recipe.HITS_SAMPLE", 1 << 20)
    pack_of = corpus.entries[:3]
    every, some = (
        pack_loss(
            target, corpus, method, pack_of, torch.Generator(), depths=3, chain_share=share
        ).rows.tolist()
        for share in (1.0, 0.3)
    )
    assert some[0] == every[0] and 0 < some[1] < 0.6 * every[1] and 0 < some[2] < 0.6 * every[2]
    spans = [end - start for entry in pack_of for start, end in entry.spans]
    assert every[0] == sum(spans)


def test_packs_keep_their_size_and_hold_once_every_dialogue_that_is_not_held_out(
    corpus: Corpus,
) -> None:
    train, held_out = split_held_out(corpus, len(corpus.entries))
    packs = make_packs(train, 300, seed=3)
    numbers = [entry.number for entry in [*held_out, *itertools.chain(*packs)]]
    assert held_out and sorted(numbers) == sorted(entry.number for entry in corpus.entries)
    assert all(len(p) == 1 or sum(e.length for e in p) <= 300 for p in packs)
    assert packs == make_packs(list(reversed(train)), 300, seed=3)


def test_the_draft_vocabulary_is_what_answers_use_most(target: Target, corpus: Corpus) -> None:
    ids = frequent_tokens(corpus.entries, 20, target.vocab_size).tolist()
    answers = (e.token_ids[start:end].tolist() for e in corpus.entries for start, end in e.spans)
    uses = Counter(itertools.chain(*answers))
    chosen = [uses[token] for token in ids]
    assert len(set(ids)) == 20 and chosen == sorted(chosen, reverse=True)
    assert chosen[-1] >= max(uses[token] for token in uses.keys() - {*ids})


@pytest.mark.parametrize("method", list(METHODS))
def test_what_a_student_learns_to_draft_is_listed_beside_its_weights(
    method: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    settings = training_settings(method, {"loss_vocab": 24})
    student: Any = settings.student(target, corpus.entries)
    student.save(tmp_path, "float32")
    listed = tmp_path / "draft_vocab.json"
    assert listed.is_file() == student.drafts_vocabulary
    if student.drafts_vocabulary:
        ids = Vocabulary.beside(str(tmp_path), target, None).ids
        assert ids is not None and ids.tolist() == student.vocabulary.ids.tolist()
        assert len(ids) == 24


@pytest.mark.parametrize("shift", [20.0, -20.0])
def test_a_recurrent_head_prefers_no_token_that_it_has_not_learnt(
    shift: float, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """By its weights alone, as other engines read them, and whatever the sign of its logits."""
    student: Any = training_settings("redrafter", {"loss_vocab": 24, "exit_dim": 32}).student(
        target, corpus.entries
    )
    with torch.no_grad():
        student.input_proj.weight[0], student.input_proj.bias[0] = 0.0, 1.0
        student.output.weight[:, 0] = shift
    student.save(tmp_path, "float32")
    head = read_head(str(tmp_path), target)
    hidden = torch.randn(40, target.hidden_size)
    best = head.logits(hidden, torch.randn_like(hidden)).topk(5).indices
    assert {*best.flatten().tolist()} <= {*student.vocabulary.ids.tolist()}


@pytest.mark.parametrize("method", [m for m in METHODS if m != "draft_target"])
def test_weights_in_8_bits_are_half_as_large_and_nearly_the_same(
    method: str, target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    student: Any = training_settings(method, {}).student(target, corpus.entries)
    for dtype in ("bfloat16", "int8"):
        (tmp_path / dtype).mkdir()
        student.save(tmp_path / dtype, dtype)
    small, large = (tmp_path / d / student.weights_file for d in ("int8", "bfloat16"))
    assert small.stat().st_size < 0.7 * large.stat().st_size
    again = training_settings(method, {"begin_with": str(tmp_path / "int8")})
    loaded: Any = again.student(target, corpus.entries)
    loaded.load(tmp_path / "int8")
    for name, value in student.published().items():
        most = value.abs().amax(-1, keepdim=True)
        assert ((loaded.published()[name] - value).abs() <= most * 0.009).all()


@pytest.mark.parametrize("method", ["eagle3", *map(slow, METHODS)])
def test_a_pack_without_answers_has_a_loss_of_zero(
    method: str, target: Target, corpus: Corpus
) -> None:
    mute = replace(corpus.entries[0], spans=())
    output = pack_loss(target, corpus, method, [mute], torch.Generator())
    assert float(output.loss.detach()) == 0.0 and float(output.rows.sum()) == 0.0
    output.loss.backward()


@pytest.mark.parametrize("method", ["eagle3", *map(slow, METHODS)])
def test_padding_a_pack_changes_no_loss(method: str, target: Target, corpus: Corpus) -> None:
    alone = pack_loss(target, corpus, method, corpus.entries[:2], None)
    padded = pack_loss(target, corpus, method, corpus.entries[:2], None, length=400)
    assert torch.equal(padded.rows, alone.rows) and torch.equal(padded.hits, alone.hits)
    torch.testing.assert_close(padded.loss, alone.loss, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("factor", "softcap"), [(1.0, None), (0.25, None), (0.25, 50.0)])
def test_the_cross_entropy_is_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, factor: float, softcap: float | None
) -> None:
    monkeypatch.setattr("engine.training.losses.CHUNK", 3)
    torch.manual_seed(0)
    x, weight = torch.randn(8, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    teacher = TopProbs(torch.randint(11, (8, 4)), torch.rand(8, 4))
    labels = torch.tensor([3, -1, 0, 10, 5, 5, -1, 2])
    head = LMHead(weight, None, LogitTransform(factor, softcap))
    prediction = Prediction(x, head, teacher, labels, 7)
    loss, hits = prediction.loss(), prediction.rank_hits(7)
    loss.backward()
    found = loss.detach(), x.grad, weight.grad
    x.grad = weight.grad = None
    logits = factor * x @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    dense = torch.zeros(8, 11).scatter_add_(1, teacher.indices, teacher.probs)[:7]
    plain = -(dense * logits[:7].log_softmax(dim=-1)).sum()
    plain.backward()
    for ours, theirs in zip(found, (plain.detach(), x.grad, weight.grad), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    order = logits.argsort(dim=-1, descending=True)
    ranks = [order[i].tolist().index(w) for i, w in enumerate(labels[:7].tolist()) if w >= 0]
    expected = torch.bincount(torch.tensor(ranks), minlength=NUM_RANKS)[:NUM_RANKS]
    assert torch.equal(hits, expected.float())


def test_a_teacher_is_mixed_with_the_text() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.4, 0.1, 0.0], [0.0, 0.0, 0.0]])
    teacher = TopProbs(torch.tensor([[4, 7, 1]] * 3), probs)
    mixed = teacher.mixed(torch.tensor([7, 2, -1]), 0.5)
    dense = torch.zeros(3, 8).scatter_add_(1, mixed.indices, mixed.probs)
    expected = torch.zeros(3, 8)
    expected[0, [4, 7, 1]] = torch.tensor([0.25, 0.625, 0.125])
    expected[1, [4, 7, 2]] = torch.tensor([0.2, 0.05, 0.5])
    torch.testing.assert_close(dense, expected)
    assert mixed.probs[0, 3] == 0.0  # a token is listed once
