"""What the tables of a dispatch say, in five steps and five scenarios: those of DistCA's documents, told anew.

    python examples/dispatch_metadata.py

Needs torch, no GPU and no other rank: rows are moved by the simulation. Each part ends with what must hold.
"""

from __future__ import annotations

import torch

from commdsl import dispatch


def moved(rows: torch.Tensor, metadata: dispatch.Metadata, most: int | None = None) -> torch.Tensor:
    """Rows of all ranks (W, T, H) where `metadata` sends them, in tensors of `most` rows, or as many as are needed."""
    received = int(metadata.num_recv_tokens[:, -1].max()) if most is None else most
    return dispatch.orchestrate_simulate(rows, rows.new_zeros(len(rows), received, rows.shape[2]), metadata)


# --- five steps -------------------------------------------------------------------------------------------------------


def lengths_of_documents() -> None:
    """Six documents on each of four ranks: random lengths, 2048 tokens on every rank."""
    torch.manual_seed(42)
    lengths = dispatch.gen_seq_lens(4, 6, 2048)
    print(f"lengths: {lengths.tolist()}")
    assert lengths.sum(1).tolist() == [2048] * 4
    assert int(lengths.min()) > 0


def two_ranks_swap() -> None:
    """Each rank sends both of its documents to the other, and has them back."""
    lengths, dest = torch.tensor([[128, 64], [96, 112]]), torch.tensor([[1, 1], [0, 0]])
    there, back = dispatch.compute_metadata(lengths, dest)
    print(f"offsets there: {there.dst_offset.tolist()}, rows received: {there.num_recv_tokens.tolist()}")
    rows = torch.zeros(2, 256, 32)
    for rank, length in enumerate(lengths.sum(1).tolist()):
        rows[rank, :length] = torch.rand(length, 32)
    assert torch.equal(moved(moved(rows, there), back, 256), rows)


def one_shard_to_several_ranks() -> None:
    """A third dimension of destinations: a shard goes to each that is not -1, whole."""
    lengths = torch.tensor([[64, 32], [48, 80], [96, 16]])
    dest = torch.tensor([[[1, 2], [0, -1]], [[0, -1], [2, 1]], [[1, 0], [0, 1]]])
    there, back = dispatch.compute_metadata(lengths, dest)
    print(f"rows received: {there.num_recv_tokens.tolist()}")
    sent = (lengths[..., None] * (dest >= 0)).sum()
    assert there.num_recv_tokens[:, -1].sum() == sent
    assert torch.equal(back.seq_recv_mask, dest >= 0)  # which copies there are to sum on the way back


def queries_and_keys() -> None:
    """A random causal dispatch: queries to one rank each, a key to every query of its document from its own on."""
    torch.manual_seed(123)
    fwd_q, rev_q, fwd_k, rev_k, attention = dispatch.create_qkv_dispatch(4, 256, 8, 4)
    queries, keys = torch.rand(2, 4, 256, 64) + 1
    assert torch.equal(moved(moved(queries, fwd_q), rev_q, 256), queries)
    copies = moved(moved(keys, fwd_k), rev_k, 4 * 256).view(4, 4, 256, 64)
    mean = copies.sum(1) / (copies != 0).sum(1)
    torch.testing.assert_close(mean, keys)
    *_, longest, most_keys, shards = attention
    print(f"longest shard: {longest.tolist()}, most keys: {most_keys.tolist()}, shards: {shards.tolist()}")


def what_is_wrong_with_a_table() -> None:
    """Not to look for by hand: `validate` names the rank and the shard."""
    lengths, dest = torch.tensor([[100, 50], [75, 25]]), torch.tensor([[1, 0], [0, -1]])
    there, back = dispatch.compute_metadata(lengths, dest)
    dispatch.validate(there, back)  # 25 rows stay unsent, which is legal
    there.dst_offset[1, 0] -= 1
    fault = None
    try:
        dispatch.validate(there, back)
    except dispatch.MetadataError as error:
        fault = error
    print(fault)
    assert fault is not None
    assert (fault.field, fault.rank, fault.shard) == ("fwd_q.dst_offset", 1, 0)


# --- five scenarios ---------------------------------------------------------------------------------------------------


def many_ranks() -> None:
    """64 ranks: what the tables take. They are held once by each rank, and sent to none."""
    torch.manual_seed(0)
    made = dispatch.create_qkv_dispatch(64, 4096, 32, 16)
    tables = [getattr(one, name) for one in made[:4] for name in ("dst_rank", "dst_offset", "seq_len")]
    print(f"tables of 64 ranks: {sum(table.nbytes for table in tables) / 2**20:.1f} MiB as int64")
    dispatch.validate(*made)


def lengths_far_apart() -> None:
    """Documents of 8 to 4096 tokens, sent by hand: who receives how many."""
    lengths = torch.tensor(
        [[2048, 512, 128, 32, 16, 8], [1024, 1024, 1024, 256, 0, 0], [4096, 0, 0, 0, 0, 0], [64] * 6]
    )
    dest = torch.tensor([[3, 2, 1, 0, -1, -1], [3, 2, 0, 1, -1, -1], [1, -1, -1, -1, -1, -1], [0, 1, 2, 0, 1, 2]])
    there, back = dispatch.compute_metadata(lengths, dest)
    dispatch.validate(there, back)
    received = there.num_recv_tokens[:, -1].double()
    print(f"rows received: {received.int().tolist()}, spread {float(received.std() / received.mean()):.2f}")
    assert int(received.sum()) == int(lengths[dest >= 0].sum())


def little_memory() -> None:
    """The fewer shards a document has, the fewer rows of keys a rank receives."""
    most = {}
    for shards in (1, 2, 4):
        torch.manual_seed(42)
        made = dispatch.create_qkv_dispatch(8, 1024, 16, shards)
        most[shards] = max(made.fwd_k.num_total_recv_tokens)
    print(f"most rows of keys on a rank, by shards of a document: {most}")
    assert most[1] < most[4]


def ranks_that_fail() -> None:
    """What was meant for two ranks of six is lost; the documents are dispatched anew over those that are left."""
    torch.manual_seed(123)
    before = dispatch.create_qkv_dispatch(6, 128, 8, 4).fwd_q
    lost = sum(int(before.seq_len[before.dst_rank == rank].sum()) for rank in (2, 4))
    torch.manual_seed(123)
    after = dispatch.create_qkv_dispatch(4, 128, 8, 4)
    dispatch.validate(*after)
    print(
        f"{lost} of {int(before.seq_len.sum())} query rows lost; then at most {max(after.fwd_q.num_total_recv_tokens)}"
    )


def more_shards_more_rows() -> None:
    """A document in more shards brings its keys to more ranks: rows that travel, and how uneven they are."""
    total = []
    for shards in (1, 2, 4, 8):
        torch.manual_seed(42)
        made = dispatch.create_qkv_dispatch(8, 512, 16, shards)
        queries = made.fwd_q.num_recv_tokens[:, -1].double()
        total.append(sum(made.fwd_q.num_total_recv_tokens) + sum(made.fwd_k.num_total_recv_tokens))
        print(f"{shards} shards: {total[-1]} rows, uneven by {float(queries.std() / queries.mean()):.2f}")
    assert total == sorted(total)


PARTS = (
    lengths_of_documents,
    two_ranks_swap,
    one_shard_to_several_ranks,
    queries_and_keys,
    what_is_wrong_with_a_table,
    many_ranks,
    lengths_far_apart,
    little_memory,
    ranks_that_fail,
    more_shards_more_rows,
)


if __name__ == "__main__":
    for part in PARTS:
        print(f"--- {part.__name__.replace('_', ' ')}")
        part()
