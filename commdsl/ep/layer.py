"""Turns the calls of EPAll2AllLayer, by its names and signatures, into dispatches and combines of an Exchange.

Assumes one process, or thread, a rank. Does not move anything itself. Where the document of the layer or its first
implementation is wrong, this does what is right; the README of this folder has the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch

from commdsl.ep import functional
from commdsl.ep.config import Configured, EPConfig
from commdsl.ep.context import DispatchCombineContext
from commdsl.ep.exchange import ENTRY, MOST_SMS, RANK
from commdsl.ep.functional import Dispatched
from commdsl.ep.layout import NONE, EPAllToAllLayoutDesc, Known, padded
from commdsl.ep.limits import whole
from commdsl.ep.scatter import judge as judge_scatter
from commdsl.machine.errors import ArgumentError
from commdsl.runtime import groups
from commdsl.runtime.collectives import all_gather, all_reduce
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.errors import DispatchError, GroupError, TensorError
from commdsl.runtime.given import Patience
from commdsl.runtime.load import Kernels
from commdsl.runtime.reporting import reported

Tensor: TypeAlias = torch.Tensor

GROWTH, UNIT = 2, 1024
"""Memory that is too small grows to so many times what came, in whole units of rows."""


class EPAll2AllLayer(Configured, torch.nn.Module):
    """Expert parallelism: tokens to the ranks of their experts, a row for each choice, and back as their sums.

    Rows of a rank are sorted by expert, then by the rank they come from, then by token: the same on every run. Both
    calls have gradients, of tokens and of routing weights.
    """

    @reported("ep_group")
    def __init__(
        self,
        ep_group: Any,
        max_tokens: int,
        hidden: int,
        topk: int,
        rank: int,
        num_tot_experts: int,
        local_world_size: int,
        world_size: int,
        dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype = torch.float32,
        num_sm: int = 20,
        enable_local_combine: bool = False,
        use_aot: bool = False,
        *,
        capacity: float = 2,
        exact: bool = True,
        device: torch.device | str | None = None,
        gradients: bool = True,
        results: int = 2,
        check: bool = False,
        drop_negative: bool = False,
        tune: Mapping[str, int | str] | None = None,
        kernels: Kernels | None = None,
        timeout: Patience = None,
    ) -> None:
        """Collective: symmetric memory on every rank of `ep_group`, a process group, its name, or None for the default.

        max_tokens: of a rank in a call, topk: experts of each, 1 to 32, num_tot_experts: of all ranks, a multiple of
        them. Ranks of a node, `local_world_size` of them, are neighbours; a token crosses to another node once.
        `num_sm`: thread blocks that a call launches, each an SM of its own. `enable_local_combine`: on their way back
        the rows of a token are first added up on the rank of their experts, so that one a rank travels, and these on
        one rank of each node, so that one a node does; sums are rounded there, too. `use_aot`: all kernels are there
        when this returns, from `kernels` that `commdsl compile --arch` built, from the cache, or built now; a call
        builds none, and may be captured at once.

        Beside the document: symmetric memory holds max_tokens * topk * `capacity` rows that come. With `exact` a call
        reads on the host how many come, once, grows the memory if it is too small, and returns tensors of so many rows.
        Without it nothing is read: a call returns tensors of all the rows that there is room for, a CUDA graph can
        capture it, and more rows than that are reported behind it (KeysError, C963). With `drop_negative` an expert of
        -1 drops a choice, too. With `check` kernels hold every row to its bounds, and `dispatch` refuses scatter
        indices that are no order of the rows, but in a capture. The rest as for `Exchange`.

        Raises DispatchError (C961) and TensorError (C951) for what no layer can have, AgreementError (C964) where ranks
        differ.
        """
        super().__init__()
        self.ep_config = EPConfig(
            max_tokens, hidden, topk, num_tot_experts, rank, world_size, local_world_size, dtype, weight_dtype
        )
        if isinstance(num_sm, bool) or not isinstance(num_sm, int) or not 1 <= num_sm <= MOST_SMS:
            raise DispatchError(
                f"`num_sm` is a whole number from 1 to {MOST_SMS}, as a GPU has {MOST_SMS} SMs, not {num_sm!r}"
            )
        self.ep_group, self.num_sm, self.exact = ep_group, num_sm, exact
        self.enable_local_combine, self.use_aot = enable_local_combine, use_aot
        self.check, self.drop_negative = check, drop_negative
        self.a2a_ctx = DispatchCombineContext.create(
            self.ep_config,
            capacity,
            group=ep_group,
            device=device,
            local_combine=enable_local_combine,
            gradients=gradients,
            results=results,
            check=check,
            tune={"sms": num_sm, **(tune or {})},
            kernels=kernels,
            timeout=timeout,
            terms={"exact": exact, "use_aot": use_aot},
        )
        self._group = self.a2a_ctx.group
        self._node = None if self.ep_config.is_intra_node else _group_of_node(self._group, self.ep_config)
        if use_aot:
            self.a2a_ctx.prepare()
            # What ranks tell each other is a collective of its own, and so is what it sets up.
            self._tell(torch.empty(0, topk, dtype=torch.int32, device=self.a2a_ctx.exchange.device))

    @reported("self")
    def dispatch(
        self,
        input: Tensor,
        exp_indices: Tensor,
        weight: Tensor | None = None,
        full_scatter_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EPAllToAllLayoutDesc]:
        """Collective: each token to the ranks of its experts, a row for each choice.

        input: (T, hidden) of the layer's dtype, T up to max_tokens, 0 too. exp_indices: (T, topk) int32, the number of
        experts drops a choice; not to be changed before `combine`. weight: (T, topk) of the weight dtype.
        full_scatter_indices: int32, for each choice the number of its row where the rows of all ranks stand one behind
        the other, of this rank's tokens, (T, topk), or of the tokens of all ranks, (sum, topk): a rank's rows then
        stand in the order of these numbers.

        Returns the rows that came, (recv_tokens, hidden), their weights, (recv_tokens,), or None, and what `combine`
        needs. The rows lie in symmetric memory, free again when neither they nor the descriptor are held.

        Raises TensorError (C951), ArgumentError (C973), DispatchError (C961), in a capture CaptureError (C955) where
        sizes are exact. An
        expert that there is not is reported behind the call: KeysError (C963).
        """
        context, config = self.a2a_ctx, self.ep_config
        self._judge(input, exp_indices, weight, full_scatter_indices)
        if self.drop_negative:
            exp_indices = torch.where(exp_indices == NONE, config.num_experts, exp_indices)
        told = self._tell(exp_indices)
        read = None
        own = None if full_scatter_indices is None else self._own(full_scatter_indices, told, len(exp_indices))
        if own is not None and self.check and not context.exchange.is_capturing:
            judge_scatter(own, exp_indices, config, self._group)
        if self.exact and context.capacity < config.most_received:
            read = self._read(told)  # before anything is sent, and not again
        exchange = context.exchange
        about = "" if own is None else "in the order of scatter indices"
        sent = None if weight is None else weight.float()
        there = functional.dispatch(exchange, input, exp_indices, sent, about=about)
        places, order = there.handle.places, None
        if own is not None:
            places, order = self._scattered(own, told, there, exp_indices)
        if self.exact:
            read = read or self._read(told)
        received = None if read is None else sum(row[config.rank] for row in read)
        rows, weights = (_ordered(one, order, received) for one in (there.rows, there.weights))
        nodes = None if config.is_intra_node else (self._of_nodes(exp_indices), self._of_nodes(places))
        known = Known(config, exchange, there.handle, there.offsets, places, _inverse(order), received, nodes)
        tokens = told[:, config.world_size].contiguous()
        return rows, None if weights is None else weights.to(config.weight_dtype), EPAllToAllLayoutDesc(known, tokens)

    @reported("self")
    def combine(self, input: Tensor, ep_a2a_layout_desc: EPAllToAllLayoutDesc) -> Tensor:
        """Collective: what experts made of the rows of a dispatch, back to their tokens: (T, hidden), for each token
        the sum of its rows, in the order of its choices, in float32, rounded once; zero where all were dropped.

        input: as many rows as the dispatch returned, (recv_tokens, hidden), float32, float16 or bfloat16; weighed
        already, if they are to be: the sum does not weigh. Raises TensorError (C951), DispatchError (C961).
        """
        known = self._known_of(ep_a2a_layout_desc)
        length = known.exchange.limits.received if known.received is None else known.received
        whole("rows", input, known.exchange.device, None, length, "input")
        wanted = self.ep_config.dtype_back
        if input.dtype.itemsize > wanted.itemsize:
            raise TensorError(
                f"`input` is {input.dtype}, and this layer combines rows of {wanted}, its tokens being "
                f"{self.ep_config.token_dtype}: pass input.to({wanted}). A product with float32 weights is float32: "
                "(rows * weights[:, None]).to(rows.dtype)"
            )
        rows = input if known.positions is None else input[known.positions[:length]]
        return functional.combine(known.exchange, rows, known.handle)

    @property
    def comm(self) -> Communicator:
        """This rank's end of the group."""
        return self.a2a_ctx.exchange.comm

    def finalize(self) -> None:
        """Collective: gives back all symmetric memory, of rows that are still held when these are let go."""
        self.a2a_ctx.finalize()

    @reported("self")
    def ep_barrier_all(self, stream: torch.cuda.Stream | None, intra_node_only: bool = False) -> None:
        """Collective: what follows on `stream` runs when all ranks, or all of this node, have come to this call on
        theirs. The host does not wait. On the processor `stream` is None, and the call returns when all have come.
        """
        group: Any = self._group
        if intra_node_only and not self.ep_config.is_intra_node:
            if self._node is None:
                raise GroupError("ranks that are threads have no group of their node: a barrier is of all of them")
            group = self._node
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            all_reduce(torch.ones(1, dtype=torch.int32, device=self.a2a_ctx.exchange.device), group=group)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _known_of(self, desc: Any) -> Known:
        """Return the routing behind a descriptor. Raises ArgumentError for anything but a layout descriptor."""
        if not isinstance(desc, EPAllToAllLayoutDesc):
            raise ArgumentError(
                "`ep_a2a_layout_desc` is an EPAllToAllLayoutDesc, the third result of `dispatch`, not "
                f"`{type(desc).__name__}`"
            )
        return desc.known

    def _judge(self, x: Tensor, experts: Tensor, weight: Tensor | None, scatter: Tensor | None) -> None:
        """What the Exchange does not know of: the layer's own numbers."""
        config, device = self.ep_config, self.a2a_ctx.exchange.device
        self.a2a_ctx.refuse_released()
        if self.exact:
            self.a2a_ctx.exchange.refuse_capture("make the layer with exact=False")
        whole("experts", experts, device, torch.int32, None, "exp_indices")
        whole("tokens", x, device, config.token_dtype, len(experts), "input")
        if x.shape[1:] != (config.hidden,):
            raise TensorError(f"`input`: expected tokens of {config.hidden} numbers, got {tuple(x.shape)}")
        if experts.shape[1:] != (config.topk,):
            found = tuple(experts.shape)
            raise TensorError(f"`exp_indices`: expected {config.topk} experts of each token, got {found}")
        if len(experts) > config.max_tokens:
            raise DispatchError(f"{len(experts)} tokens, and the layer is for up to {config.max_tokens} of a rank")
        if weight is not None:
            whole("weights", weight, device, config.weight_dtype, len(experts), "weight")
            if weight.shape != experts.shape:
                raise TensorError(
                    f"`weight`: expected {tuple(experts.shape)}, as `exp_indices`, got {tuple(weight.shape)}"
                )
        if scatter is not None:
            whole("scatter indices", scatter, device, torch.int32, None, "full_scatter_indices")
            if scatter.shape[1:] != (config.topk,) or len(scatter) < len(experts):
                raise TensorError(
                    f"`full_scatter_indices`: expected scatter indices of this rank's tokens, {tuple(experts.shape)}, "
                    f"or of all ranks' tokens, got {tuple(scatter.shape)}"
                )

    def _tell(self, experts: Tensor) -> Tensor:
        """(ranks, ranks + 2) int32, by rank: its rows for each rank, its tokens, whether it holds nothing outgrown."""
        config, count = self.ep_config, self.ep_config.world_size
        rank = torch.where(
            (experts >= 0) & (experts < config.num_experts), experts // config.num_experts_per_rank, count
        )
        row = experts.new_zeros(count + 2)
        row.scatter_add_(0, rank.flatten().long(), experts.new_ones(()).expand(rank.numel()))
        # Filled: what is assigned to one place is copied from the host, which no graph captures.
        row[count].fill_(len(experts))
        row[count + 1].fill_(self.a2a_ctx.has_idle)
        found: Tensor = all_gather(row, group=self._group)
        return found.view(count, count + 2)

    def _read(self, told: Tensor) -> list[list[int]]:
        """The host read. Memory grows where it is too small for a rank, and what nobody uses is given back."""
        read: list[list[int]] = told.tolist()
        count = self.ep_config.world_size
        if all(row[count + 1] for row in read):
            self.a2a_ctx.release_outgrown()
        most = max(sum(row[rank] for row in read) for rank in range(count))
        if most > self.a2a_ctx.capacity:
            grown = -(-most // UNIT) * UNIT * GROWTH
            self.a2a_ctx.reallocate_dispatch_output_buf(min(grown, self.ep_config.most_received))
            if self.use_aot:
                self.a2a_ctx.prepare()
        return read

    def _own(self, numbers: Tensor, told: Tensor, length: int) -> Tensor:
        """Scatter indices of this rank's tokens, of those of all ranks where these are given."""
        if len(numbers) == length:
            return numbers
        config = self.ep_config
        if self.check and not self.a2a_ctx.exchange.is_capturing:
            total = int(told[:, config.world_size].sum())
            if len(numbers) != total:
                raise TensorError(
                    f"`full_scatter_indices`: expected those of {length} or {total} tokens, got {len(numbers)}"
                )
        begin = told[: config.rank, config.world_size].sum()
        return numbers[(begin + torch.arange(length, device=numbers.device)).clamp(max=len(numbers) - 1)]

    def _scattered(self, own: Tensor, told: Tensor, there: Dispatched, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Of this rank's choices the rows that they become, by `own`, and of each row of this rank its place."""
        config, count = self.ep_config, self.ep_config.world_size
        before = told[:, :count].sum(0).cumsum(0) - told[:, :count].sum(0)  # rows of lesser ranks
        kept = (experts >= 0) & (experts < config.num_experts)
        rank = torch.where(kept, experts // config.num_experts_per_rank, 0)
        places = torch.where(kept, own - before[rank], NONE).int()
        everyone = all_gather(padded(own, config), group=self._group).view(count, -1)
        origins, place = there.handle.origins, torch.arange(len(there.handle.origins), device=own.device)
        comes = place < there.offsets[-1]
        source, entry = (torch.where(comes, one, 0) for one in (origins >> 32 & RANK, origins & ENTRY))
        return places, torch.argsort(torch.where(comes, everyone[source, entry], 2**31 + place), stable=True)

    def _of_nodes(self, rows: Tensor) -> Tensor:
        """(nodes, max_tokens, topk): what the rank of each node that has this rank's number there has, padded."""
        config = self.ep_config
        everyone = all_gather(padded(rows, config), group=self._group).view(-1, config.max_tokens, config.topk)
        found: Tensor = everyone[config.rank % config.local_world_size :: config.local_world_size].contiguous()
        return found


def _ordered(rows: Any, order: Tensor | None, received: int | None) -> Any:
    """The rows that came, or all; in this order of places, if there is one."""
    if rows is None or order is None:
        return rows if rows is None or received is None else rows[:received]
    return rows[order if received is None else order[:received]]


def _inverse(order: Tensor | None) -> Tensor | None:
    if order is None:
        return None
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _group_of_node(name: str, config: EPConfig) -> Any:
    """The ranks of this rank's node, as a group; None where ranks are threads. Collective."""
    _, group = groups.resolve(name)
    if not isinstance(group, torch.distributed.ProcessGroup):
        return None
    ranks = torch.distributed.get_process_group_ranks(group)
    begin = config.node * config.local_world_size
    mine = ranks[begin : begin + config.local_world_size]
    return torch.distributed.new_group(mine, backend="gloo", use_local_synchronization=True)
