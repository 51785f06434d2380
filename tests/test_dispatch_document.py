"""The 47 functions of DistCA's documents that test or show something, in our words: 37 tests, ten parts of an example.

Each test has the name of the document's, and says what that asserts; where the document asserts what its own code never
did, it says what holds instead, and commdsl/dispatch/README.md says why. The last tests are of what else the documents
promise: arguments in their forms, and the kernel by its name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

from commdsl import dispatch  # noqa: E402 - after the check for torch
from commdsl.dispatch import Metadata, MetadataError, orchestrate_simulate  # noqa: E402 - after the check for torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import dispatch_metadata as example  # noqa: E402 - after the check for torch


def table(numbers: Any) -> Any:
    return torch.tensor(numbers)


def drawn(seed: int, *sizes: int) -> Any:
    """`create_qkv_dispatch` of (world_size, total_seq_len, num_seqs, max_cp_degree)."""
    torch.manual_seed(seed)
    return dispatch.create_qkv_dispatch(*sizes)


class TestGenSeqLens:
    """Lengths at random: rows of the table sum to what was asked for."""

    def test_basic_functionality(self) -> None:
        """Of the shape asked for, int32, positive."""
        lengths = dispatch.gen_seq_lens(2, 3, 120)

        assert (lengths.shape, lengths.dtype) == ((2, 3), torch.int32)
        assert lengths.sum(1).tolist() == [120, 120]
        assert (lengths > 0).all()

    def test_single_sequence(self) -> None:
        """One sequence has all tokens."""
        assert dispatch.gen_seq_lens(3, 1, 100).tolist() == [[100], [100], [100]]

    def test_many_sequences(self) -> None:
        """Many short ones have a token each at least: upstream, for most seeds only."""
        for seed in range(50):
            torch.manual_seed(seed)
            lengths = dispatch.gen_seq_lens(1, 10, 50)

            assert (int(lengths.sum()), int(lengths.min()) >= 1) == (50, True)

    def test_zero_total_length(self) -> None:
        """No tokens are lengths of 0."""
        assert torch.equal(dispatch.gen_seq_lens(2, 3, 0), torch.zeros(2, 3, dtype=torch.int32))

    def test_reproducibility(self) -> None:
        """A seed is a table."""
        found = []
        for seed in (42, 42, 43):
            torch.manual_seed(seed)
            found.append(dispatch.gen_seq_lens(2, 4, 200).tolist())

        assert found[0] == found[1] != found[2]

    def test_rounding_correction(self) -> None:
        """What rounding leaves is not lost."""
        lengths = dispatch.gen_seq_lens(1, 3, 10)

        assert (int(lengths.sum()), int(lengths.min()) > 0) == (10, True)

    def test_distribution_properties(self) -> None:
        """The mean is the share, and lengths differ."""
        torch.manual_seed(123)
        lengths = dispatch.gen_seq_lens(1, 100, 10000).float()

        assert abs(float(lengths.mean()) - 100) < 5
        assert float(lengths.std()) > 1

    def test_what_it_does_not_do(self) -> None:
        """Lengths are not even."""
        assert dispatch.gen_seq_lens(2, 5, 1000)[0].tolist() != [200] * 5


def tables(dst_rank: Any, dst_offset: Any, seq_len: Any, num_recv_tokens: Any) -> Metadata:
    """Metadata as the documents make it by hand: nothing but these four."""
    return Metadata(*map(table, (dst_rank, dst_offset, seq_len, num_recv_tokens)))


SWAP = ([[1], [0]], [[0], [0]], [[5], [3]], [[0, 3, 3], [5, 0, 5]])


class TestOrchestrateSimulate:
    """Rows of all ranks, moved by Metadata that says no world_size."""

    def test_basic_simulation(self) -> None:
        """Two ranks swap; what nothing is sent to stays."""
        sent = torch.rand(2, 10, 4)
        got = orchestrate_simulate(sent, torch.zeros(2, 5, 4), tables(*SWAP))

        assert torch.equal(got[1], sent[0, :5])
        assert torch.equal(got[0, :3], sent[1, :3])
        assert not got[0, 3:].any()

    def test_padding_handling(self) -> None:
        """-1 goes nowhere."""
        given = tables([[1, -1], [0, -1]], [[0, 0], [0, 0]], [[3, 0], [2, 0]], [[0, 2, 2], [3, 0, 3]])
        sent = torch.randn(2, 5, 3)
        got = orchestrate_simulate(sent, torch.zeros(2, 5, 3), given)

        assert torch.equal(got[1, :3], sent[0, :3])
        assert torch.equal(got[0, :2], sent[1, :2])
        assert not got[0, 2:].any()
        assert not got[1, 3:].any()

    def test_context_parallelism_simulation(self) -> None:
        """A shard goes to each of its ranks."""
        given = tables(
            [[[1, 2]], [[-1, -1]], [[0, -1]]],
            [[[0, 0]], [[0, 0]], [[0, 0]]],
            [[4], [0], [3]],
            [[0, 0, 3, 3], [4, 0, 0, 4], [4, 0, 0, 4]],
        )
        sent = torch.rand(3, 5, 2)
        got = orchestrate_simulate(sent, torch.zeros(3, 5, 2), given)

        assert torch.equal(got[1, :4], sent[0, :4])
        assert torch.equal(got[2, :4], sent[0, :4])
        assert torch.equal(got[0, :3], sent[2, :3])

    def test_offset_handling(self) -> None:
        """Shards lie at their offsets."""
        given = tables([[1, 1], [0, 0]], [[0, 3], [0, 2]], [[3, 2], [2, 1]], [[0, 3, 3], [5, 0, 5]])
        sent = torch.rand(2, 5, 3)
        got = orchestrate_simulate(sent, torch.zeros(2, 6, 3), given)

        assert torch.equal(got[1, :5], sent[0])
        assert torch.equal(got[0, :3], sent[1, :3])

    def test_accumulation_behavior(self) -> None:
        """Shards of a rank follow each other there, too, where they go to itself."""
        sent = torch.rand(1, 10, 2)
        got = orchestrate_simulate(sent, torch.zeros(1, 10, 2), tables([[0, 0, 0]], [[0, 2, 5]], [[2, 3, 1]], [[6, 6]]))

        assert torch.equal(got[0, :6], sent[0, :6])

    def test_what_it_does_not_do(self) -> None:
        """It adds nothing: what lay there is overwritten."""
        sent = torch.randn(2, 10, 3)
        got = orchestrate_simulate(sent, torch.ones(2, 5, 3), tables(*SWAP))

        assert torch.equal(got[1], sent[0, :5])


class TestComputeMetadata:
    """Lengths and destinations as tables, there and back."""

    def test_simple_query_metadata(self) -> None:
        """Rows received, by source and in all. Tables are of the shape of the destinations, and offsets follow each
        other at a destination: the document has a third dimension, and an offset per source.
        """
        lengths, dest = table([[10, 5], [8, 12]]), table([[1, 0], [0, 1]])
        there, back = dispatch.compute_metadata(lengths, dest)

        assert torch.equal(there.dst_rank, dest)
        assert torch.equal(there.seq_len, lengths)
        assert there.dst_offset.tolist() == [[0, 0], [5, 10]]
        assert there.num_recv_tokens.tolist() == [[5, 8, 13], [10, 12, 22]]
        assert back.dst_rank.shape[0] == 2

    def test_padding_handling(self) -> None:
        """What goes nowhere counts nowhere. The document indexes a third dimension, and takes what rank 1 sends for
        rows of rank 0.
        """
        there, _ = dispatch.compute_metadata(table([[10, 0], [5, 0]]), table([[1, -1], [0, -1]]))

        assert there.dst_rank.tolist() == [[1, -1], [0, -1]]
        assert int(there.seq_len[0, 1]) == 0
        assert there.num_recv_tokens.tolist() == [[0, 5, 5], [10, 0, 10]]

    def test_context_parallelism_metadata(self) -> None:
        """A third dimension of destinations stays; the way back says which copies were sent."""
        lengths = table([[12, 8], [6, 9]])
        dest = table([[[1, 0, -1], [0, -1, -1]], [[0, 1, -1], [1, 0, -1]]])
        there, back = dispatch.compute_metadata(lengths, dest)

        assert torch.equal(there.dst_rank, dest)
        assert torch.equal(there.seq_len, lengths)
        assert there.num_recv_tokens.tolist() == [[20, 15, 35], [12, 15, 27]]
        assert torch.equal(back.seq_recv_mask, dest >= 0)

    def test_offset_computation(self) -> None:
        """At a destination offsets rise in the order of ranks and shards."""
        lengths, dest = table([[5, 3, 4], [2, 6, 1], [8, 2, 5]]), table([[0, 0, 1], [2, 2, 2], [1, 1, 0]])
        there, _ = dispatch.compute_metadata(lengths, dest)

        assert [there.dst_offset[dest == rank].tolist() for rank in range(3)] == [[0, 5, 8], [0, 4, 12], [0, 2, 8]]

    def test_conservation_properties(self) -> None:
        """What is sent is received, and comes back from where it was: the document compares totals with sources."""
        lengths = table([[10, 15, 5], [8, 12, 7], [20, 3, 11]])
        there, back = dispatch.compute_metadata(lengths, table([[1, 2, 0], [0, 1, 2], [2, 0, 1]]))

        assert int(there.num_recv_tokens[:, -1].sum()) == int(lengths.sum())
        assert there.num_recv_tokens[:, :-1].sum(0).tolist() == lengths.sum(1).tolist()
        assert torch.equal(there.num_recv_tokens[:, :-1], back.num_recv_tokens[:, :-1].T)

    def test_bijection_property(self) -> None:
        """Ranks that swap receive what the other has."""
        lengths = table([[10, 5], [8, 12]])
        there, _ = dispatch.compute_metadata(lengths, table([[1, 1], [0, 0]]))

        assert there.num_recv_tokens[:, -1].tolist() == [20, 15]

    def test_what_it_does_not_do(self) -> None:
        """It moves nothing, and what it is given stays."""
        lengths, dest = table([[10, 5], [8, 12]]), table([[1, 0], [0, 1]])
        dispatch.compute_metadata(lengths, dest)

        assert (lengths.tolist(), dest.tolist()) == ([[10, 5], [8, 12]], [[1, 0], [0, 1]])


class TestCreateQkvDispatch:
    """A random causal dispatch. Upstream passes none of these: more shards than ranks end in an IndexError there."""

    def test_basic_qkv_dispatch(self) -> None:
        """Four tables of all ranks and what attention needs. Queries have one destination, so (W, S): the document
        has (W, S, 1).
        """
        made = drawn(42, 2, 64, 4, 4)

        assert len(made) == 5
        assert [one.world_size for one in made[:4]] == [2] * 4
        assert made.fwd_q.dst_rank.dim() == 2
        assert made.fwd_k.dst_rank.shape == (*made.fwd_q.dst_rank.shape, 4)

    def test_sequence_length_generation(self) -> None:
        """Every rank has its tokens, in documents that are cut evenly. A shard is a part of a document, and the table
        has padding: in the document each cell is a positive multiple of the most shards.
        """
        lengths = drawn(123, 2, 128, 8, 4).fwd_q.seq_len

        assert lengths.sum(1).tolist() == [128, 128]
        assert (lengths >= 0).all()

    def test_context_parallelism_assignment(self) -> None:
        """A key shard goes to its own query and those after it, so a shard of a document in n has 1 to n copies: in the
        document, a power of two.
        """
        made = drawn(456, 3, 32, 4, 8)
        copies = (made.fwd_k.dst_rank >= 0).sum(2)

        assert int(copies.max()) <= 8
        assert torch.equal(copies > 0, made.fwd_q.dst_rank >= 0)

    def test_causal_attention_constraints(self) -> None:
        """The way back of keys says which copies were sent."""
        made = drawn(789, 2, 16, 2, 4)

        assert made.rev_k.seq_recv_mask.shape == made.fwd_k.dst_rank.shape
        assert set(made.rev_k.seq_recv_mask.unique().tolist()) <= {0, 1}

    def test_metadata_consistency(self) -> None:
        """As many rows come back as went."""
        totals = [int(one.num_recv_tokens[:, -1].sum()) for one in drawn(101, 2, 32, 4, 4)[:4]]

        assert totals[0] == totals[1] == 64
        assert totals[2] == totals[3] >= 64

    def test_attention_metadata(self) -> None:
        """Five tensors, of which the sums do not fall."""
        attention = drawn(202, 2, 32, 4, 4).attention
        queries, keys, longest, most, shards = attention

        assert len(attention) == 5
        assert all(isinstance(one, torch.Tensor) for one in (queries, keys, longest, most, shards))
        assert attention[0] is queries
        assert attention[-1] is shards
        assert (queries.diff() >= 0).all()
        assert (keys.diff() >= 0).all()

    def test_divisibility_constraint(self) -> None:
        """Tokens that cannot be cut evenly are an AssertionError that says so; it is a ValueError, too."""
        for kind in (AssertionError, ValueError):
            with pytest.raises(kind, match="divisible"):
                dispatch.create_qkv_dispatch(2, 17, 2, 4)

    def test_edge_cases(self) -> None:
        """One rank with one document, and so many documents that all have one token."""
        made = drawn(303, 1, 4, 1, 2)

        assert (made.fwd_q.world_size, made.fwd_q.seq_len.tolist()) == (1, [[4]])
        assert drawn(404, 8, 128, 16, 8).fwd_q.world_size == 8

    def test_what_it_does_not_do(self) -> None:
        """It does not balance: some rank receives more than another."""
        assert len(set(drawn(505, 2, 32, 4, 4).fwd_q.num_total_recv_tokens)) == 2


def arguments(**changed: int) -> Any:
    sizes = {"world_size": 2, "num_seqs": 4, "max_seq_shard": 2, "num_tokens": 64, "hidden_size": 32, "seed": 42}
    return SimpleNamespace(**{**sizes, **changed})


class TestTestQkvDispatch:
    """The documents' own test of it all."""

    def test_integration_behavior(self) -> None:
        """It comes to its end."""
        dispatch.test_qkv_dispatch(arguments())

    def test_query_reconstruction(self) -> None:
        """Queries come back as they were, also where they go anywhere."""
        dispatch.test_query_dispatch(arguments(seed=123))
        made = drawn(123, 2, 64, 4, 2)
        sent = torch.rand(2, 64, 32)

        assert torch.equal(example.moved(example.moved(sent, made.fwd_q), made.rev_q, 64), sent)

    def test_kv_deduplication(self) -> None:
        """The mean of the copies that come back of a key is the key."""
        made = drawn(456, 2, 64, 4, 2)
        sent = torch.rand(2, 64, 32) + 1
        copies = example.moved(example.moved(sent, made.fwd_k), made.rev_k, 128).view(2, 2, 64, 32)

        torch.testing.assert_close(copies.sum(1) / (copies != 0).sum(1), sent)

    def test_reproducibility(self) -> None:
        """Any seed will do, twice."""
        for seed in (789, 789, 790):
            dispatch.test_qkv_dispatch(arguments(seed=seed))

    def test_parameter_validation(self) -> None:
        """From the least to larger ones, more shards than ranks with them."""
        for sizes in (
            {"num_tokens": 32, "hidden_size": 64},
            {"world_size": 1, "num_seqs": 1, "max_seq_shard": 1, "num_tokens": 4, "hidden_size": 8},
            {"world_size": 4, "num_seqs": 8, "max_seq_shard": 4, "num_tokens": 128, "hidden_size": 256},
            {"world_size": 2, "max_seq_shard": 8},
        ):
            dispatch.test_qkv_dispatch(arguments(**sizes))

    def test_what_it_does_not_test(self) -> None:
        """It sends nothing: no group is asked for."""
        assert not torch.distributed.is_initialized()
        dispatch.test_qkv_dispatch(arguments())

    def test_validation_properties(self) -> None:
        """It finds what is wrong: sizes that cannot be, by an AssertionError."""
        with pytest.raises(AssertionError):
            dispatch.test_qkv_dispatch(arguments(num_tokens=63))


@pytest.mark.parametrize("part", example.PARTS, ids=lambda part: part.__name__)
def test_examples(part: Any) -> None:
    """The parts of the example, one for each of the documents' ten."""
    assert len(example.PARTS) == 10
    part()


def test_forms_of_arguments() -> None:
    """Totals may be a list or a tuple; an output may require gradients, which a simulation has none of; what goes
    nowhere may end after the tensor.
    """
    there, back = dispatch.compute_metadata(table([[3, 9]]), table([[0, -1]]))
    totals = dispatch.Metadata(**{**vars(there), "num_total_recv_tokens": [3]})
    dispatch.validate(totals, back)
    sent, got = torch.rand(1, 4, 2, requires_grad=True), torch.zeros(1, 3, 2, requires_grad=True)

    assert totals.get_slice(0).num_total_recv_tokens == 3
    assert torch.equal(orchestrate_simulate(sent, got, there), sent[:, :3])
    assert got.is_leaf
    with pytest.raises(MetadataError, match=r"seq_len: expected \(W, S\), got \(2,\)"):
        orchestrate_simulate(sent, got, there.get_slice(0))


def test_tables_are_where_their_lengths_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed goes to the device of what it is computed from."""
    asked: list[Any] = []
    for kind in (Metadata, dispatch.AttentionLayout):
        monkeypatch.setattr(kind, "to", lambda self, device: asked.append(device) or self)
    lengths = table([[3, 2]])
    dispatch.compute_metadata(lengths, table([[0, 0]]))
    dispatch.compute_attn_layout_seqlens(lengths, lengths.cumsum(1), table([[0, 0]]))

    assert asked == [lengths.device] * 3


def test_kernel_by_its_name() -> None:
    """`dispatch_kernel` fills the tensors it is given: queries, queries and keys, and back, keys summed."""
    made = drawn(7, 2, 32, 3, 2)
    sent = torch.rand(2, 2, 32, 4)
    want = [example.moved(rows, one) for rows, one in zip(sent, (made.fwd_q, made.fwd_k), strict=True)]
    copies = (made.fwd_k.dst_rank >= 0).sum(2)

    def work(rank: int, group: str) -> None:
        route = dispatch.Route(*made[:4], rank=rank)
        buffers = dispatch.Dispatcher(dispatch.Limits.of([route], (16, 16)), group=group)
        queries, keys = (torch.zeros_like(one[rank]) for one in want)
        dispatch.dispatch_kernel(sent[0, rank], queries, route, buffers)
        assert torch.equal(queries, want[0][rank])
        dispatch.dispatch_kernel(sent[0, rank], queries, route, buffers, sent[1, rank], keys)
        assert torch.equal(keys, want[1][rank])
        rows, sums = torch.zeros(2, 32, 4)
        received = queries[: route.queries].contiguous(), keys[: route.keys].contiguous()
        dispatch.dispatch_kernel(received[0], rows, route, buffers, received[1], sums, is_backward=True)
        assert torch.equal(rows, sent[0, rank])
        times = copies[rank].repeat_interleave(made.fwd_k.seq_len[rank])[:, None]
        torch.testing.assert_close(sums, times * sent[1, rank])
        with pytest.raises(dispatch.DispatchError, match="or neither"):
            dispatch.dispatch_kernel(sent[0, rank], queries, route, buffers, sent[1, rank])

    in_group(2, work)
