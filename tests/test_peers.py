"""The communicators of Hamilton Attention: to the next rank and from all to all, in loops of one's own.

Assumes ranks that are threads. Does not look at streams of a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thread_ranks import in_group, outcomes  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl.attention import A2AComm, RingComm  # noqa: E402 - as above


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_ring_of_keys_and_values(ranks: int) -> None:
    """Keys and values that are sent on in each step are in step t those of rank r - t, with buffers and without."""

    def run(rank: int, group: str) -> None:
        comm = RingComm(group)
        assert (comm.rank, comm.world_size) == (rank, ranks)
        k, v = torch.full((2, 3), float(rank)), torch.full((4,), rank, dtype=torch.bfloat16)
        spare: tuple[Any, Any] = (None, None)
        for step in range(ranks):
            assert k.unique().tolist() == [(rank - step) % ranks]
            assert v.unique().tolist() == [(rank - step) % ranks]
            before = (k, v)
            k, v = comm.send_recv_kv(k, v, *spare)
            comm.wait()
            assert spare[0] is None or (k.data_ptr(), v.data_ptr()) == (spare[0].data_ptr(), spare[1].data_ptr())
            spare = before if step % 2 else (None, None)
        assert torch.equal(comm.send_recv(k, torch.empty_like(k)), comm.send_recv(k))

    in_group(ranks, run)


def test_commit() -> None:
    """The order of ring-flash-attention, send, commit, wait, is taken; a commit of nothing, or a second one, is not."""

    def run(rank: int, group: str) -> None:
        comm, x = RingComm(group), torch.full((3,), float(rank))
        for _ in range(2):
            with pytest.raises(commdsl.OpError, match="has nothing to send"):
                comm.commit()
            received = comm.send_recv(x)
            comm.commit()
            with pytest.raises(commdsl.OpError, match="called twice"):
                comm.commit()
            comm.wait()
            assert received.tolist() == [1.0 - rank] * 3
        comm.send_recv_kv(x, x)
        with pytest.raises(commdsl.OpError, match="called twice"):
            comm.commit()

    in_group(2, run)


def test_tensors_of_many_sizes_from_all_to_all() -> None:
    """What rank p lists for rank q is what q receives of p, whatever its shape, also where it is empty."""

    def shape(source: int, target: int) -> tuple[int, ...]:
        return (source + target, 2) if source != target else (0, 2)

    def run(rank: int, group: str) -> None:
        comm = A2AComm(group)
        sent = [torch.full(shape(rank, other), 10 * rank + other, dtype=torch.int32) for other in range(3)]
        received = [torch.empty(shape(other, rank), dtype=torch.int32) for other in range(3)]
        # The largest tensor is the same on all ranks: one more goes to oneself where it is not.
        for tensors in (sent, received):
            tensors[rank] = torch.full((3, 2), 11 * rank, dtype=torch.int32)
        assert comm.all_to_all(sent, received) is None
        comm.wait()
        for other in range(3):
            assert torch.equal(received[other], torch.full_like(received[other], 10 * other + rank))

    in_group(3, run)


def test_from_all_to_all_in_one_rank_and_with_nothing() -> None:
    """A group of one copies, and nothing may be sent."""

    def alone(rank: int, group: str) -> list[float]:
        received = [torch.zeros(2)]
        A2AComm(group).all_to_all([torch.ones(2)], received)
        return received[0].tolist()

    def nothing(rank: int, group: str) -> None:
        A2AComm(group).all_to_all([torch.ones(0)] * 2, [torch.ones(0)] * 2)

    assert in_group(1, alone) == [[1.0, 1.0]]
    in_group(2, nothing)


X = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda g: RingComm(g).send_recv(X, torch.zeros(4)), commdsl.TensorError, r"receives \(4,\)"),
        (lambda g: RingComm(g).send_recv(X, X.int()), commdsl.TensorError, "int32"),
        (lambda g: RingComm(g).send_recv(X.t()), commdsl.TensorError, "contiguous"),
        (lambda g: RingComm(g).send_recv_kv(X, None), commdsl.TensorError, "takes a torch tensor"),
        (lambda g: A2AComm(g).all_to_all([X], [X, X]), commdsl.TensorError, "each of 2 ranks, not 1 and 2"),
        (lambda g: A2AComm(g).all_to_all([X, X], [X, X.int()]), commdsl.TensorError, "one dtype"),
        (lambda g: A2AComm(g).all_to_all([X, X.t()], [X, X]), commdsl.TensorError, "contiguous"),
        (lambda g: A2AComm(g).all_to_all([X, [1]], [X, X]), commdsl.TensorError, "takes a torch tensor"),
        (lambda g: RingComm("nobody"), commdsl.GroupError, "nobody"),
        (lambda g: A2AComm("nobody"), commdsl.GroupError, "nobody"),
    ],
)
def test_refused(call: Any, kind: type[Exception], words: str) -> None:
    """What cannot be sent is one line, before any rank is waited for."""
    with pytest.raises(kind, match=words):
        call(commdsl.threads(2)[1])


def test_sizes_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose largest tensors differ are told so."""
    monkeypatch.setenv("COMMDSL_TIMEOUT", "20")
    names = commdsl.threads(2)

    def run(rank: int) -> None:
        tensors = [torch.zeros(3 + rank)] * 2
        A2AComm(names[rank]).all_to_all(tensors, tensors)

    assert {type(found) for found in outcomes(2, run)} <= {commdsl.AgreementError, commdsl.PeerError}
