"""Turns calls in the form of inference engines' dispatchers, vLLM's and SGLang's, into calls of an Exchange.

Assumes that the experts of a token differ. Imports neither engine: what they compare by identity, or subclass, is
given, or mixed in. Does not quantise: `quantize` does, before tokens travel, and their scales travel beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from commdsl.ep import functional
from commdsl.ep.exchange import Exchange
from commdsl.ep.functional import Dispatched
from commdsl.runtime.errors import DispatchError
from commdsl.runtime.reporting import reported

Tensor: TypeAlias = torch.Tensor

Quantize: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Tokens (T, H) to what travels, (T, H) of a narrower dtype, and scales (T, ...)."""


class Format(Enum):
    """In what form tokens reach experts."""

    STANDARD = "standard"  # (rows, H), a row for each choice, sorted by expert
    BATCHED_EXPERTS = "batched_experts"  # (experts, rows of each, H), of which some count

    DEEPEP_NORMAL = "deepep_normal"  # SGLang's words for the same two
    DEEPEP_LL = "deepep_ll"

    def is_standard(self) -> bool:
        return self is Format.STANDARD

    def is_deepep_normal(self) -> bool:
        return self is Format.DEEPEP_NORMAL

    def is_deepep_ll(self) -> bool:
        return self is Format.DEEPEP_LL

    def is_deepep(self) -> bool:
        return self in (Format.DEEPEP_NORMAL, Format.DEEPEP_LL)


class Ways:
    """There and back, as rows or in batches of experts: what both engines' forms share."""

    def __init__(self, exchange: Exchange, quantize: Quantize | None) -> None:
        self.exchange, self.quantize = exchange, quantize
        self.most = exchange.ranks * exchange.limits.rows  # tokens that an expert may have
        self.first = exchange.rank * exchange.keys_a_rank  # this rank's first expert

    def there(self, x: Tensor, experts: Tensor, weights: Tensor, about: str = "") -> Dispatched:
        """Sends tokens to their experts, with their weights; a choice of -1 is dropped."""
        given = x if self.quantize is None else self.quantize(x)
        chosen = torch.where(experts < 0, self.exchange.num_keys, experts).to(torch.int32)
        return functional.dispatch(self.exchange, given, chosen, weights.float().contiguous(), about=about)

    def parts(self, found: Dispatched) -> tuple[Tensor, Tensor | None]:
        """Rows, and their scales where they have any."""
        return (found.rows, None) if isinstance(found.rows, Tensor) else (found.rows[0], found.rows[1])

    def tokens(self, found: Dispatched) -> Tensor:
        """(experts,) int32: how many rows each of this rank's experts has."""
        return found.counts.sum(1, dtype=torch.int32)

    def experts(self, found: Dispatched, elsewhere: int) -> Tensor:
        """(rows,) int32: the number of each row's expert among all; `elsewhere` for rows that do not count."""
        place = torch.arange(self.exchange.limits.received, device=found.offsets.device)
        own = torch.searchsorted(found.offsets, place, right=True)
        return torch.where(own < self.exchange.keys_a_rank, own + self.first, elsewhere).int()

    def batched(self, rows: Tensor, found: Dispatched) -> Tensor:
        """(experts, most, ...): the rows of each expert, and behind them any."""
        begins = (found.offsets - self.tokens(found))[:, None]
        return rows[(begins + torch.arange(self.most, device=rows.device)).clamp(max=len(rows) - 1)]

    def unbatched(self, made: Tensor, found: Dispatched) -> Tensor:
        """The way back of `batched`."""
        place = torch.arange(self.exchange.limits.received, device=made.device)
        own = torch.searchsorted(found.offsets, place, right=True).clamp(max=self.exchange.keys_a_rank - 1)
        begins = found.offsets - self.tokens(found)
        return made[own, (place - begins[own]).clamp(max=self.most - 1)]

    def back(self, rows: Tensor, found: Dispatched, weights: Tensor | None) -> Tensor:
        """`weights`: of the tokens; None: rows are weighed."""
        if weights is not None and self.exchange.local_combine:
            assert found.weights is not None
            weights = found.weights[: len(rows)]  # those that came beside them
        return functional.combine(self.exchange, rows, found.handle, weights)


# --- vLLM -------------------------------------------------------------------------------------------------------------


def _exchange_of(engine: PrepareAndFinalize | Dispatcher, /, *_: Any, **__: Any) -> Exchange:
    return engine._ways.exchange


class ExpertTokens(NamedTuple):
    """vLLM's ExpertTokensMetadata: how many rows each of this rank's experts has."""

    expert_num_tokens: Tensor  # (experts,) int32
    expert_num_tokens_cpu: Tensor | None  # the same on the host, where sizes are exact


class PrepareAndFinalize:
    """vLLM's FusedMoEPrepareAndFinalizeModular: mix it in before that class.

    Standard: `prepare` returns rows (R, H), one for each choice, sorted by expert, with expert ids (R, 1) among all
    experts and weights (R, 1): a top-1 problem. With `exact` R is what came, by one host read; else it is
    `limits.received`, and rows that do not count have an expert of another rank. BatchedExperts: rows (E_l, M, H), M
    tokens of all ranks, of which as many count as the metadata says; ids and weights stay the caller's.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        batched: bool = False,
        exact: bool = False,
        quantize: Quantize | None = None,
        activation_format: Any = None,
        metadata: Callable[[Tensor, Tensor | None], Any] = ExpertTokens,
    ) -> None:
        """`activation_format` and `metadata`: vLLM's own FusedMoEActivationFormat and ExpertTokensMetadata."""
        self._ways, self._batched, self._exact = Ways(exchange, quantize), batched, exact
        self._format = activation_format or (Format.BATCHED_EXPERTS if batched else Format.STANDARD)
        self._metadata = metadata
        self._found: Dispatched | None = None

    @property
    def activation_format(self) -> Any:
        return self._format

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        return self._ways.exchange.limits.rows if self._batched else None

    def num_dispatchers(self) -> int:
        return self._ways.exchange.ranks

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return False

    @reported(_exchange_of)
    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Tensor, Tensor | None, Any, Tensor | None, Tensor | None]:
        """a1: (T, H); topk_weights, topk_ids: (T, K). Returns what experts take: rows, scales or None, how many rows
        each expert has, and in the standard format expert ids and weights. Raises DispatchError (C961), in a capture
        CaptureError (C955) where sizes are exact.
        """
        ways = self._ways
        if self._exact:
            ways.exchange.refuse_capture("make it with exact=False")
        if num_experts != ways.exchange.num_keys:
            raise DispatchError(f"the Exchange is of {ways.exchange.num_keys} experts, and the call of {num_experts}")
        if defer_input_quant and ways.quantize is not None:
            raise DispatchError("experts quantise themselves: make it without `quantize`")
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise DispatchError("weights on the input are for one expert a token: its row would be several")
            a1 = a1 * topk_weights.to(a1.dtype)
        about = "weights on the input" if apply_router_weight_on_input else "weights on the output"
        self._found = found = ways.there(a1, topk_ids, topk_weights, about)
        rows, scales = ways.parts(found)
        tokens = ways.tokens(found)
        if self._batched:
            of_scales = None if scales is None else ways.batched(scales, found)
            return ways.batched(rows, found), of_scales, self._metadata(tokens, None), None, None
        host = tokens.cpu() if self._exact else None
        length = len(rows) if host is None else int(host.sum())
        elsewhere = (num_experts - 1 if ways.first == 0 else 0) if ways.exchange.ranks > 1 else -1
        ids, weights = ways.experts(found, elsewhere), found.weights
        assert weights is not None
        return (
            rows[:length],
            None if scales is None else scales[:length],
            self._metadata(tokens, host),
            ids[:length, None],
            weights[:length, None],
        )

    @reported(_exchange_of)
    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any = None,
    ) -> None:
        """Writes (T, H): the sum over the choices of each token. fused_expert_output: what experts made of what
        `prepare` returned; weighed here, or by `weight_and_reduce_impl`, unless the input was. Raises DispatchError
        (C961) where no `prepare` went before.
        """
        found, self._found = self._found, None
        if found is None:
            raise DispatchError("`finalize` without a `prepare` before it")
        made, weights = fused_expert_output, None
        if self._batched:
            made = self._ways.unbatched(made, found)
            weights = None if apply_router_weight_on_input else topk_weights.float().contiguous()
        elif weight_and_reduce_impl is not None:
            made = weight_and_reduce_impl.apply(
                output=None,
                fused_expert_output=made,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        else:
            made = made.view(-1, made.shape[-1])
            if self._ways.exchange.local_combine:
                weights = None if apply_router_weight_on_input else topk_weights
            elif not apply_router_weight_on_input:
                made = (made.float() * topk_weights).to(made.dtype)
        output.copy_(self._ways.back(made.contiguous(), found, weights))


# --- SGLang -----------------------------------------------------------------------------------------------------------


class TopK(Protocol):
    """SGLang's TopKOutput."""

    topk_weights: Tensor  # (T, K)
    topk_ids: Tensor  # (T, K), -1 for none


class NormalOutput(NamedTuple):
    """SGLang's DeepEPNormalDispatchOutput: a row for each choice, sorted by expert."""

    hidden_states: Tensor  # (R, H)
    hidden_states_scale: Tensor | None
    topk_ids: Tensor  # (R, 1), the number of the expert on this rank
    topk_weights: Tensor  # (R, 1)
    num_recv_tokens_per_expert: list[int]

    @property
    def format(self) -> Format:
        return Format.DEEPEP_NORMAL


class LowLatencyOutput(NamedTuple):
    """SGLang's DeepEPLLDispatchOutput: for each expert as many rows as there may be."""

    hidden_states: Tensor  # (E_l, M, H)
    hidden_states_scale: Tensor | None  # (E_l, M, ...)
    topk_ids: Tensor  # the caller's
    topk_weights: Tensor
    masked_m: Tensor  # (E_l,) int32: rows that count
    expected_m: int

    @property
    def format(self) -> Format:
        return Format.DEEPEP_LL


class Made(Protocol):
    """SGLang's DeepEPNormalCombineInput and DeepEPLLCombineInput: what experts made, in the form of the output before;
    in the normal one already times its weights.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


class Dispatcher:
    """SGLang's BaseDispatcher: mix it in before that class. `dispatch` is `dispatch_a`, which launches, and then
    `dispatch_b`, which returns what came; `combine` likewise. Between an a and its b the host is free, and so is the
    stream behind it. Normal mode reads on the host how many rows came; `low_latency` reads nothing.
    """

    def __init__(self, exchange: Exchange, *, low_latency: bool = False, quantize: Quantize | None = None) -> None:
        self._ways, self._low_latency = Ways(exchange, quantize), low_latency
        self._topk: TopK | None = None
        self._found: Dispatched | None = None
        self._home: Tensor | None = None

    @reported(_exchange_of)
    def dispatch(self, hidden_states: Tensor, topk_output: TopK) -> NormalOutput | LowLatencyOutput:
        """hidden_states: (T, H)."""
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    @reported(_exchange_of)
    def dispatch_a(self, hidden_states: Tensor, topk_output: TopK) -> None:
        """Raises CaptureError (C955) for normal mode in a capture."""
        if not self._low_latency:
            self._ways.exchange.refuse_capture("make it with low_latency=True")
        found = self._ways.there(hidden_states, topk_output.topk_ids, topk_output.topk_weights)
        self._found, self._topk = found, topk_output

    def dispatch_b(self) -> NormalOutput | LowLatencyOutput:
        """Raises DispatchError (C961) where no `dispatch_a` went before."""
        ways, found, topk = self._ways, self._found, self._topk
        if found is None or topk is None:
            raise DispatchError("`dispatch_b` without a `dispatch_a` before it")
        rows, scales = ways.parts(found)
        if self._low_latency:
            batched, of_scales = (None if one is None else ways.batched(one, found) for one in (rows, scales))
            assert batched is not None
            expected = -(-topk.topk_ids.numel() * ways.exchange.ranks // ways.exchange.num_keys)
            return LowLatencyOutput(batched, of_scales, topk.topk_ids, topk.topk_weights, ways.tokens(found), expected)
        assert found.weights is not None
        counts = ways.tokens(found).tolist()
        length = sum(counts)
        ids = (ways.experts(found, -1) - ways.first)[:length, None]
        of_scales = None if scales is None else scales[:length]
        return NormalOutput(rows[:length], of_scales, ids, found.weights[:length, None], counts)

    @reported(_exchange_of)
    def combine(self, combine_input: Made) -> Tensor:
        """(T, H): the sum over the choices of each token."""
        self.combine_a(combine_input)
        return self.combine_b()

    @reported(_exchange_of)
    def combine_a(self, combine_input: Made) -> None:
        """Raises DispatchError (C961) where no dispatch went before."""
        ways, found = self._ways, self._found
        if found is None:
            raise DispatchError("a combine without a dispatch before it")
        made, weights = combine_input.hidden_states, None
        if self._low_latency:
            made, weights = ways.unbatched(made, found), combine_input.topk_weights.float().contiguous()
        self._home, self._found, self._topk = ways.back(made.contiguous(), found, weights), None, None

    def combine_b(self) -> Tensor:
        """Raises DispatchError (C961) where no `combine_a` went before."""
        found, self._home = self._home, None
        if found is None:
            raise DispatchError("`combine_b` without a `combine_a` before it")
        return found
