"""Metadata of dispatches: the class, the fixtures of the upstream project, and what is right where it is wrong."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from commdsl import dispatch  # noqa: E402 - after the check for torch
from commdsl.dispatch import Metadata, MetadataError  # noqa: E402 - after the check for torch
from commdsl.ir.routes import Mask  # noqa: E402 - after the check for torch
from commdsl.machine.errors import ArgumentError  # noqa: E402 - after the check for torch

ROOT = Path(__file__).parent.parent

# Lengths, destinations, and what must come of them: offsets, rows received, and the way back's ranks, offsets, lengths
# and rows received. The numbers are those of the upstream project.
FIXTURES = {
    "three ranks": (
        [[10, 5, 0], [8, 12, 4], [6, 0, 9]],
        [[1, 2, -1], [2, 0, 1], [0, -1, 2]],
        [[0, 0, 0], [5, 0, 10], [12, 0, 13]],
        [[0, 12, 6, 18], [10, 4, 0, 14], [5, 8, 9, 22]],
        [[1, 2, -1], [0, 1, -1], [0, 1, 2]],
        [[8, 0, 0], [0, 20, 0], [10, 0, 6]],
        [[12, 6, 0], [10, 4, 0], [5, 8, 9]],
        [[0, 10, 5, 15], [12, 4, 8, 24], [6, 0, 9, 15]],
        [2, 2, 3],
    ),
    "one destination": (
        [[128, 64, 0], [96, 128, 32]],
        [[1, 0, -1], [0, 1, 0]],
        [[0, 0, 0], [64, 128, 160]],
        [[64, 128, 192], [128, 128, 256]],
        [[0, 1, 1], [0, 1, -1]],
        [[128, 0, 224], [0, 96, 0]],
        [[64, 96, 32], [128, 128, 0]],
        [[64, 128, 192], [128, 128, 256]],
        [3, 2],
    ),
    "copies": (
        [[128, 64, 0], [96, 128, 32]],
        [[[1, 0], [0, -1], [-1, -1]], [[0, 1], [1, 0], [0, -1]]],
        [[[0, 0], [128, 0], [0, 0]], [[192, 128], [224, 288], [416, 0]]],
        [[192, 256, 448], [128, 224, 352]],
        [[0, 0, 1, 1, 1], [0, 1, 1, -1, -1]],
        [[192, 128, 0, 352, 224], [0, 256, 96, 0, 0]],
        [[128, 64, 96, 128, 32], [128, 96, 128, 0, 0]],
        [[192, 128, 320], [256, 224, 480]],
        [5, 3],
    ),
}


def table(numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def two_documents() -> tuple[Metadata, Metadata]:
    return dispatch.compute_metadata(table([[10, 5, 0], [8, 12, 4]]), table([[1, 0, -1], [0, 0, 1]]))


@pytest.mark.parametrize("name", FIXTURES)
def test_fixtures(name: str) -> None:
    """Lengths and destinations become the upstream project's offsets and counts, there and back."""
    lengths, dests, offset, counts, ranks, rows, back, returned, num_seqs = FIXTURES[name]
    there, home = dispatch.compute_metadata(table(lengths), table(dests))

    assert there.dst_rank.tolist() == dests
    assert there.dst_offset.tolist() == offset
    assert there.seq_len.tolist() == lengths
    assert there.num_recv_tokens.tolist() == counts
    assert there.num_total_recv_tokens == tuple(row[-1] for row in counts)
    assert home.dst_rank.tolist() == ranks
    assert home.dst_offset.tolist() == rows
    assert home.seq_len.tolist() == back
    assert home.num_recv_tokens.tolist() == returned
    assert home.num_seqs.tolist() == num_seqs
    dispatch.validate(there, home)


def test_shards_without_rows_are_counted() -> None:
    """A shard without rows before another costs the other no place: upstream's slice lost the last shard here."""
    there, _ = dispatch.compute_metadata(table([[6, 0, 9], [1, 2, 0]]), table([[0, -1, 1], [1, 0, -1]]))

    assert there.num_seqs.tolist() == [3, 2]
    assert there.get_slice(0).seq_len.tolist() == [6, 0, 9]


def test_only_copies_have_a_mask() -> None:
    """The way back of copies says which were sent and how long shards are; no other Metadata does."""
    plain = dispatch.compute_metadata(table([[3]]), table([[0]]))
    there, home = dispatch.compute_metadata(table([[3, 2]]), table([[[0, -1], [-1, -1]]]))

    assert all(one.seq_recv_mask is None and one.recv_seq_lens is None for one in (*plain, there))
    assert home.seq_recv_mask.tolist() == [[[True, False], [False, False]]]
    assert home.recv_seq_lens.tolist() == [[3, 2]]


def test_intermediates() -> None:
    """On request: rows and shards to each rank, and shards received."""
    lengths, dests = table([[4, 3], [2, 0]]), table([[1, -1], [1, 0]])
    _, _, (rows, shards, received) = dispatch.compute_metadata(lengths, dests, return_intermediate=True)

    assert shards.squeeze(2).tolist() == [[[0, 1], [0, 0]], [[0, 1], [1, 0]]]
    assert torch.equal(rows.squeeze(2), shards.squeeze(2) * lengths[..., None])
    assert received.tolist() == [1, 2]


def test_slice() -> None:
    """A rank's slice has its shards without padding, all counts, its total as a number, and no ranks."""
    there, home = two_documents()
    one = there.get_slice(0)

    assert one.dst_rank.tolist() == [1, 0]
    assert one.dst_offset.tolist() == [0, 0]
    assert one.seq_len.tolist() == [10, 5]
    assert one.num_recv_tokens.tolist() == [5, 20, 25]
    assert one.num_total_recv_tokens == 25
    assert (one.world_size, one.num_seqs) == (None, None)
    assert home.get_slice(1).dst_rank.tolist() == [0, 1]


def test_slice_of_copies_keeps_the_mask_whole() -> None:
    """Mask and lengths describe forward shards, whose number the way back does not know: they keep their padding."""
    torch.manual_seed(1)
    made = dispatch.create_qkv_dispatch(4, 64, 3, 4)
    one = made.rev_k.get_slice(2)

    assert one.seq_recv_mask.shape == made.fwd_k.dst_rank.shape[1:]
    assert one.recv_seq_lens.tolist() == made.fwd_k.seq_len[2].tolist()


def test_slice_of_no_rank() -> None:
    """There is no slice of a slice, nor of a rank that does not exist."""
    there, _ = two_documents()

    with pytest.raises(MetadataError, match="slice of one rank"):
        there.get_slice(0).get_slice(0)
    with pytest.raises(MetadataError, match="no such rank"):
        there.get_slice(2)
    with pytest.raises(MetadataError, match="no such rank"):
        there.get_slice(-1)


def test_dtypes() -> None:
    """Normalised numbers are the same in the kernels' dtypes, in place of none of the old ones."""
    torch.manual_seed(2)
    for one in dispatch.create_qkv_dispatch(2, 32, 2, 2)[:4]:
        normal = one.normalize_dtype()
        names = ("dst_rank", "dst_offset", "seq_len", "num_recv_tokens", "num_seqs")

        assert (one.normalized, normal.normalized) == (False, True)
        assert [getattr(normal, name).dtype for name in names] == [
            torch.int32,
            torch.uint32,
            torch.uint32,
            torch.uint64,
            torch.int32,
        ]
        assert all(getattr(normal, name).tolist() == getattr(one, name).tolist() for name in names)
        assert normal.num_total_recv_tokens == one.num_total_recv_tokens
        if one.seq_recv_mask is not None:
            assert (normal.seq_recv_mask.dtype, normal.recv_seq_lens.dtype) == (torch.uint32, torch.uint32)
            assert torch.equal(normal.seq_recv_mask.bool(), one.seq_recv_mask)


def test_dtypes_of_a_slice() -> None:
    """A slice is normalised like the whole, and twice is once."""
    there, _ = two_documents()
    one = there.get_slice(1).normalize_dtype().normalize_dtype()

    assert one.seq_len.dtype is torch.uint32
    assert one.seq_len.tolist() == [8, 12, 4]
    assert one.num_seqs is None


@pytest.mark.parametrize("normal", [False, True])
def test_saved(normal: bool) -> None:
    """Metadata is pickled and copied, and saved for `torch.load` as it is by default, in either form of its numbers."""
    torch.manual_seed(2)
    made = dispatch.create_qkv_dispatch(2, 32, 2, 2)
    if normal:
        made = made._replace(**{name: getattr(made, name).normalize_dtype() for name in made._fields[:4]})
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for found in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), torch.load(file)):
        dispatch.validate(*found)
        for one, other in zip(found[:4], made[:4], strict=True):
            assert one.dst_offset.dtype is other.dst_offset.dtype
            assert one.dst_offset.tolist() == other.dst_offset.tolist()


def test_shown() -> None:
    """A Metadata says its ranks, its rows, and how uneven they arrive."""
    there, _ = two_documents()

    assert repr(there) == (
        "Metadata(2 ranks, up to 3 shards on one: 39 rows, 39 received; the most of a rank is 28.2% above the mean)"
    )
    assert repr(there.get_slice(0).normalize_dtype()) == "Metadata(one rank: 2 shards, 15 rows)"


def test_numbers_too_large() -> None:
    """A number that its dtype cannot hold is refused, not wrapped."""
    there, _ = two_documents()

    with pytest.raises(MetadataError, match="dst_offset: expected 0 to 4294967295"):
        replace(there, dst_offset=there.dst_offset + 2**32).normalize_dtype()


def test_moved() -> None:
    """`to` and `cpu` give contiguous tensors and leave the rest."""
    there, _ = two_documents()
    moved = replace(there, seq_len=there.seq_len.T.contiguous().T).to("cpu").cpu()

    assert moved.seq_len.is_contiguous()
    assert torch.equal(moved.seq_len, there.seq_len)
    assert moved.num_total_recv_tokens == there.num_total_recv_tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu() -> None:
    """`cuda` asks torch for a GPU, and says what torch says where there is none."""
    there, _ = two_documents()

    with pytest.raises((RuntimeError, AssertionError)):
        there.cuda()


def test_lengths_by_the_old_seeds() -> None:
    """Where upstream's lengths were positive, the same seed gives the same lengths."""
    torch.manual_seed(0)

    assert dispatch.gen_seq_lens(2, 4, 512).tolist() == [[165, 245, 45, 57], [73, 138, 110, 191]]
    torch.manual_seed(42)
    assert dispatch.gen_seq_lens(2, 3, 120).tolist() == [[48, 49, 23], [57, 26, 37]]


@pytest.mark.parametrize(("num_seqs", "total"), [(1, 7), (3, 120), (10, 50), (16, 32), (16, 16), (100, 10000), (5, 3)])
def test_lengths(num_seqs: int, total: int) -> None:
    """Rows of the table sum to the total, and no length is below 1 where there are rows for all."""
    torch.manual_seed(7)
    lengths = dispatch.gen_seq_lens(3000, num_seqs, total)

    assert lengths.dtype is torch.int32
    assert lengths.shape == (3000, num_seqs)
    assert (lengths.sum(dim=1) == total).all()
    assert int(lengths.min()) >= (1 if total >= num_seqs else 0)


def test_lengths_of_nothing() -> None:
    """No rows are no rows; rows need a sequence to be in; nothing is negative, nor more than int32 holds."""
    assert dispatch.gen_seq_lens(2, 3, 0).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert dispatch.gen_seq_lens(2, 0, 0).shape == (2, 0)
    for sizes in ((2, 0, 5), (0, 1, 5), (2, 3, -1), (1, 2, 2**31)):
        with pytest.raises(MetadataError, match="C960"):
            dispatch.gen_seq_lens(*sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 17, 2, 6), "total_seq_len: expected divisible by max_cp_degree, 6, got 17"),
        ((4, 63, 3, 3), "max_cp_degree: expected a power of two, got 3"),
        ((4, 66, 3, 4), "total_seq_len: expected divisible by max_cp_degree, 4, got 66"),
        ((4, 64, 0, 4), "num_seqs: expected 1 or more, got 0"),
        ((0, 64, 1, 1), "world_size: expected 1 or more, got 0"),
    ],
)
def test_no_such_dispatch(sizes: tuple[int, int, int, int], message: str) -> None:
    """Sizes of which no dispatch can be drawn are refused with a reason."""
    with pytest.raises(MetadataError, match=message):
        dispatch.create_qkv_dispatch(*sizes)


@pytest.mark.parametrize(
    ("lengths", "dests", "message"),
    [
        ([[4, -1]], [[0, 0]], "seq_len at rank 0, shard 1: expected 0 or more, got -1"),
        ([[4], [1]], [[0], [2]], "global_dispatch at rank 1, shard 0: expected -1 ..< 2, got 2"),
        ([[4], [1]], [[[0, 1]], [[0, -2]]], "global_dispatch at rank 1, shard 0, replica 1: expected -1 ..< 2, got -2"),
        ([[4, 1]], [[0]], "a shard has its destinations"),
        ([4, 1], [0, 0], "lengths are by rank and shard"),
    ],
)
def test_no_such_table(lengths: object, dests: object, message: str) -> None:
    """Tables that are no shards are refused, with the place."""
    with pytest.raises(MetadataError, match=message):
        dispatch.compute_metadata(table(lengths), table(dests))


def test_a_table_of_fractions() -> None:
    """Numbers of rows are whole."""
    with pytest.raises(MetadataError, match="whole numbers"):
        dispatch.compute_metadata(torch.tensor([[1.5]]), table([[0]]))


def test_rows_are_counted_by_their_true_source() -> None:
    """A document of which rank 0 has 4 rows and rank 1 has 6, queries swapped: upstream counted [0, 10, 10] here."""
    there, home = dispatch.compute_metadata_kv(
        kv_to_q_mapping=table([[[[0, 0], [1, 0]]], [[[1, 0], [-1, -1]]]]),
        kv_to_q_rank=table([[[0, 0]], [[1, -1]]]),
        kv_context_size=table([[0], [4]]),
        q_to_num_kv_seq=table([[1], [2]]),
        q_to_num_kv_token=table([[4], [10]]),
        seq_len=table([[4], [6]]),
        num_seqs=table([1, 1]),
        q_dispatch=table([[1], [0]]),
        q_seq_to_dst=table([[[0, 1]], [[1, 0]]]),
        max_num_local_seqs=1,
    )

    assert there.num_recv_tokens.tolist() == [[4, 6, 10], [4, 0, 4]]
    assert there.dst_rank.tolist() == [[[1, 0]], [[0, -1]]]
    assert there.dst_offset.tolist() == [[[0, 0]], [[4, 0]]]
    assert home.num_recv_tokens.tolist() == [[4, 4, 8], [6, 0, 6]]
    assert home.get_slice(0).num_total_recv_tokens == 8
    queries = dispatch.compute_metadata(table([[4], [6]]), table([[1], [0]]))
    dispatch.validate(*queries, there, home)


def test_tables_of_keys_must_agree() -> None:
    """Keys that would leave a gap, lie in no order or serve no query are refused, with the place."""
    tables = {
        "kv_to_q_mapping": table([[[[0, 0], [0, 1]], [[0, 1], [-1, -1]]]]),
        "kv_to_q_rank": table([[[0, 0], [1, -1]]]),
        "kv_context_size": table([[0, 4]]),
        "q_to_num_kv_seq": table([[1, 2]]),
        "q_to_num_kv_token": table([[4, 10]]),
        "seq_len": table([[4, 6]]),
        "num_seqs": table([2]),
        "q_dispatch": table([[0, 0]]),
        "q_seq_to_dst": table([[[1], [1]]]),
        "max_num_local_seqs": 2,
    }
    there, _ = dispatch.compute_metadata_kv(**tables)
    assert there.dst_offset.tolist() == [[[0, 4], [8, 0]]]
    wrong = {
        "kv_to_q_mapping": (
            table([[[[0, 0], [0, 2]], [[0, 1], [-1, -1]]]]),
            "rank 0, shard 0, replica 1: .* no such q",
        ),
        "kv_to_q_rank": (table([[[0, 1], [1, -1]]]), "kv_to_q_rank at rank 0, shard 0, replica 1: expected 1, got 2"),
        "kv_context_size": (table([[0, 5]]), "kv_context_size at rank 0, shard 1, replica 0: expected 8, got 9"),
        "q_to_num_kv_seq": (table([[2, 2]]), "kv_to_q_rank at rank 0, shard 0, replica 1: expected 1, got 2"),
        "q_to_num_kv_token": (table([[5, 10]]), "kv_context_size at rank 0, shard 0, replica 1: expected 4, got 5"),
        "num_seqs": (table([1]), "num_seqs at rank 0: expected 2 to 2, got 1"),
        "q_seq_to_dst": (table([[[1], [0]]]), "q_seq_to_dst at rank 0, shard 1: expected 1, got 0"),
        "seq_len": (table([[4, 6, 1]]), r"q_dispatch: expected \(1, 3\) or \(1, 3, C\), got \(1, 2\)"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(MetadataError, match=message):
            dispatch.compute_metadata_kv(**{**tables, name: value})


def test_attention_of_padded_tables() -> None:
    """Padding writes nothing: upstream lost the first length of rank 0 here, and counted shards wrong."""
    layout = dispatch.compute_attn_layout_seqlens(
        table([[10, 5, 0], [8, 12, 0]]), table([[10, 15, 0], [8, 20, 0]]), table([[0, 1, -1], [0, 0, -1]])
    )
    rows, keys, most_rows, most_keys, num = layout

    assert rows.tolist() == [[10, 18, 30], [5, 5, 5]]
    assert keys.tolist() == [[10, 18, 38], [15, 15, 15]]
    assert (most_rows.tolist(), most_keys.tolist()) == ([12, 5], [20, 15])
    assert num.tolist() == [3, 1]
    assert layout.kv_begin.tolist() == [[0, 10, 18], [0, 0, 0]]


def test_attention_of_ranks_that_receive_nothing() -> None:
    """A rank that receives nothing has no shards; a shard without rows is one."""
    layout = dispatch.compute_attn_layout_seqlens(
        table([[0, 3], [0, 0]]), table([[0, 3], [0, 0]]), table([[0, 0], [0, -1]])
    )

    assert layout.num_local_seqs_recv.tolist() == [3, 0]
    assert layout.get_slice(0).cu_seqlens_q.tolist() == [0, 3, 3]
    assert layout.get_slice(1).cu_seqlens_q.tolist() == []


def test_attention_slice() -> None:
    """A rank's slice has its shards alone; there is none of a slice."""
    layout = dispatch.compute_attn_layout_seqlens(table([[2], [3]]), table([[2], [3]]), table([[1], [1]]))
    one = layout.get_slice(1).to("cpu")

    assert [part.tolist() for part in one] == [[2, 5], [2, 5], 3, 3, 2]
    with pytest.raises(MetadataError, match="slice of one rank"):
        one.get_slice(0)
    with pytest.raises(MetadataError, match="no such rank"):
        layout.get_slice(2)


def test_exclusive_cumsum() -> None:
    """Each entry becomes the sum of those before it, along one dimension."""
    numbers = table([[3, 1, 4], [1, 5, 9]])

    assert dispatch.exclusive_cumsum(numbers).tolist() == [[0, 0, 0], [3, 1, 4]]
    assert dispatch.exclusive_cumsum(numbers, dim=1).tolist() == [[0, 3, 4], [0, 1, 6]]
    assert dispatch.exclusive_cumsum(numbers[:0]).shape == (0, 3)


def test_documented_methods() -> None:
    """Everything the upstream document names is here, and so is what the package says it has."""
    assert {"get_slice", "normalize_dtype", "cuda"} <= set(dir(Metadata))
    assert all(getattr(dispatch, name) is not None for name in dispatch.__all__)
    with pytest.raises(AttributeError):
        _ = dispatch.nothing


def test_metadata_error() -> None:
    """An error of numbers is a ValueError with a code, and carries the place as data."""
    there, home = two_documents()
    there.dst_offset[1, 0] += 1
    with pytest.raises(
        ValueError, match=r"error\[C960\]: fwd_q.dst_offset at rank 1, shard 0, replica 0: expected"
    ) as e:
        dispatch.validate(there, home)

    assert (e.value.field, e.value.rank, e.value.shard) == ("fwd_q.dst_offset", 1, 0)
    assert (e.value.expected, e.value.got) == (5, 6)


def test_import_is_light() -> None:
    """Naming the package brings in neither torch nor numpy."""
    code = (
        "import sys; from commdsl import dispatch; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("mask", [None, Mask.CAUSAL])
def test_a_random_dispatch_is_valid(mask: Mask | None) -> None:
    """A drawn dispatch obeys every law, normalised or not, and its seed decides it."""
    for world_size, degree in ((1, 1), (2, 1), (2, 2), (4, 4), (8, 2)):
        for num_seqs in (1, 4, 8):
            torch.manual_seed(num_seqs)
            one = dispatch.create_qkv_dispatch(world_size, 64, num_seqs, degree)
            torch.manual_seed(num_seqs)
            other = dispatch.create_qkv_dispatch(world_size, 64, num_seqs, degree)

            assert torch.equal(one.fwd_k.dst_offset, other.fwd_k.dst_offset)
            assert one.fwd_k.dst_rank.shape[2] == degree
            dispatch.validate(*one, mask=mask)
            dispatch.validate(*(part.normalize_dtype() for part in one[:4]), one.attention, mask=mask)


def test_conservation() -> None:
    """Key rows received are the rows of all shards, times the copies that were sent."""
    torch.manual_seed(5)
    made = dispatch.create_qkv_dispatch(4, 128, 4, 4)
    copies = (made.fwd_k.dst_rank >= 0).sum(dim=2)

    assert sum(made.fwd_k.num_total_recv_tokens) == int((made.fwd_k.seq_len * copies).sum())
    assert sum(made.rev_k.num_total_recv_tokens) == sum(made.fwd_k.num_total_recv_tokens)
    assert sum(made.fwd_q.num_total_recv_tokens) == int(made.fwd_q.seq_len.sum())


@pytest.mark.parametrize("rank", ["1", 1.5, None, True, [0]])
def test_a_slice_of_no_number(rank: object) -> None:
    """What is no whole number names no rank: a TypeError, in the caller's terms."""
    made = dispatch.create_qkv_dispatch(2, 64, 2, 2)
    for whole in (made.fwd_q, made.attention):
        with pytest.raises(ArgumentError, match="`rank` is a whole number, not"):
            whole.get_slice(rank)
        assert issubclass(ArgumentError, TypeError)


@pytest.mark.parametrize("wrong", [None, "8", 1.5, [], object(), torch.zeros(0), torch.zeros(4, 8)])
def test_arguments_of_other_kinds(wrong: object) -> None:
    """Functions of tables refuse other objects by the argument's name, as a ValueError or TypeError of the package."""
    made = dispatch.create_qkv_dispatch(2, 64, 2, 2)
    rows = torch.zeros(2, 64, 4)
    calls = [
        lambda: dispatch.validate(wrong, made.rev_q),
        lambda: dispatch.validate(*made[:4], wrong if wrong is not None else 3),
        lambda: dispatch.Route(*made[:4], wrong if wrong is not None else 3, rank=0),
        lambda: dispatch.orchestrate_simulate(rows, rows, wrong),
        lambda: dispatch.simulate_reduce(wrong if not isinstance(wrong, torch.Tensor) else None, rows, made.fwd_q),
        lambda: dispatch.gen_seq_lens(wrong, 3, 50),
        lambda: dispatch.gen_seq_lens(2, 3, wrong),
        lambda: dispatch.create_qkv_dispatch(2, 64, 2, wrong),
        lambda: dispatch.exclusive_cumsum(rows, wrong),
        lambda: dispatch.Limits.of(wrong, (2,)),
    ]
    for call in calls:
        with pytest.raises((ArgumentError, MetadataError, dispatch.DispatchError, ValueError)) as caught:
            call()
        assert str(caught.value).startswith("error[C")
