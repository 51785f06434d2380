"""Attention over a sequence that lies on many ranks: any schedule with a `yield`, forward and backward.

Importing this imports nothing else; each name below loads what it needs when it is first used.

    placement     document lengths -> which tokens a rank has
    document, circling Hamilton Attention by its names and signatures -> calls of the loop
    hamilton      a number of ranks -> cycles, and the tables of who sends what
    machines      a device and nodes, or a topology -> links, carriers, speed
    auto          a machine and the sizes of a call -> the schedule to run, and why
    masks         which tokens see which -> few calls of a kernel
    pieces        what yields hand over -> the calls of each visit, and the law that ties visits to the mask
    loop          a schedule with yields -> attention of all ranks' tokens, and the way back
    planned       an op, a placement, a mask and a kernel -> all that is done at the visits of a rank, but for the data
    travel        a rank's rows <-> tensors that travel
    kernel        the form of an attention kernel: forward with log-sum-exp, and backward
    kernels       what a call is of -> the kernel that runs it, by a stated rule
    torch_kernels torch's own kernels, and the reference
    cudnn_kernels cuDNN's, asked for gradients that are summed in a fixed order
    flash_kernels those of the `flash_attn` packages
    flash_parts   their backward, and that of torch's flash, by parts that keep a GPU busy
    merge         partial results -> the whole
    peers         a group -> the communicators of Hamilton Attention, for loops of one's own
    arguments     what a call says -> strings and numbers, or a refusal that says what to write
    ways          the name of a schedule -> the ops of its two ways
    run           a call -> what runs it, made once
    torch_ops     the operators that torch knows, with their gradients
    interface     the call that users make
    drop_in       `scaled_dot_product_attention` within a `with`
    sequence      a whole sequence <-> the rows of a rank, and their positions
    gathering     the rows of each rank -> those of all, compared as they travel
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commdsl.machine.lazy import lazy

if TYPE_CHECKING:
    from commdsl.attention.auto import Choice as Choice
    from commdsl.attention.auto import choice as choice
    from commdsl.attention.document import (
        _update_out_and_lse,
        hamilton_attention_forward_causal_flash_attn,
        hamilton_attention_forward_causal_flash_attn_profile,
        hamilton_attention_forward_full_flash_attn,
        hamilton_attention_forward_full_flash_attn_profile,
        hamilton_attention_forward_full_flash_attn_two_nodes,
        hamilton_attention_forward_full_flash_attn_two_nodes_profile,
        ring_attention_forward_flash_attn,
        ring_attention_forward_flash_attn_profile,
        zigzag_ring_attention_forward_flash_attn,
        zigzag_ring_attention_forward_flash_attn_profile,
    )
    from commdsl.attention.drop_in import sequence_parallel as sequence_parallel
    from commdsl.attention.hamilton import (
        calculate_in_mapping_circle,
        calculate_inter_node_mapping,
        calculate_intra_node_in_mapping_two_nodes,
        calculate_intra_node_out_mapping_two_nodes,
        calculate_out_mapping_circle,
        calculate_source_rank_per_iter,
        gen_hamilton_circle,
        gen_hamilton_circle_two_nodes,
        gen_hamilton_path_local,
    )
    from commdsl.attention.interface import attention as attention
    from commdsl.attention.peers import A2AComm as A2AComm
    from commdsl.attention.peers import RingComm as RingComm
    from commdsl.attention.placement import Placement as Placement
    from commdsl.attention.placement import Run as Run
    from commdsl.attention.placement import contiguous as contiguous
    from commdsl.attention.placement import zigzag as zigzag
    from commdsl.attention.sequence import positions as positions
    from commdsl.attention.sequence import shard_sequence as shard_sequence
    from commdsl.attention.sequence import unshard_sequence as unshard_sequence

__all__ = [
    "A2AComm",
    "Choice",
    "Placement",
    "RingComm",
    "Run",
    "_update_out_and_lse",
    "attention",
    "calculate_in_mapping_circle",
    "calculate_inter_node_mapping",
    "calculate_intra_node_in_mapping_two_nodes",
    "calculate_intra_node_out_mapping_two_nodes",
    "calculate_out_mapping_circle",
    "calculate_source_rank_per_iter",
    "choice",
    "contiguous",
    "gen_hamilton_circle",
    "gen_hamilton_circle_two_nodes",
    "gen_hamilton_path_local",
    "hamilton_attention_forward_causal_flash_attn",
    "hamilton_attention_forward_causal_flash_attn_profile",
    "hamilton_attention_forward_full_flash_attn",
    "hamilton_attention_forward_full_flash_attn_profile",
    "hamilton_attention_forward_full_flash_attn_two_nodes",
    "hamilton_attention_forward_full_flash_attn_two_nodes_profile",
    "positions",
    "ring_attention_forward_flash_attn",
    "ring_attention_forward_flash_attn_profile",
    "sequence_parallel",
    "shard_sequence",
    "unshard_sequence",
    "zigzag",
    "zigzag_ring_attention_forward_flash_attn",
    "zigzag_ring_attention_forward_flash_attn_profile",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "A2AComm": "commdsl.attention.peers",
        "Choice": "commdsl.attention.auto",
        "Placement": "commdsl.attention.placement",
        "RingComm": "commdsl.attention.peers",
        "Run": "commdsl.attention.placement",
        "_update_out_and_lse": "commdsl.attention.document",
        "attention": "commdsl.attention.interface",
        "calculate_in_mapping_circle": "commdsl.attention.hamilton",
        "calculate_inter_node_mapping": "commdsl.attention.hamilton",
        "calculate_intra_node_in_mapping_two_nodes": "commdsl.attention.hamilton",
        "calculate_intra_node_out_mapping_two_nodes": "commdsl.attention.hamilton",
        "calculate_out_mapping_circle": "commdsl.attention.hamilton",
        "calculate_source_rank_per_iter": "commdsl.attention.hamilton",
        "choice": "commdsl.attention.auto",
        "contiguous": "commdsl.attention.placement",
        "gen_hamilton_circle": "commdsl.attention.hamilton",
        "gen_hamilton_circle_two_nodes": "commdsl.attention.hamilton",
        "gen_hamilton_path_local": "commdsl.attention.hamilton",
        "hamilton_attention_forward_causal_flash_attn": "commdsl.attention.document",
        "hamilton_attention_forward_causal_flash_attn_profile": "commdsl.attention.document",
        "hamilton_attention_forward_full_flash_attn": "commdsl.attention.document",
        "hamilton_attention_forward_full_flash_attn_profile": "commdsl.attention.document",
        "hamilton_attention_forward_full_flash_attn_two_nodes": "commdsl.attention.document",
        "hamilton_attention_forward_full_flash_attn_two_nodes_profile": "commdsl.attention.document",
        "positions": "commdsl.attention.sequence",
        "ring_attention_forward_flash_attn": "commdsl.attention.document",
        "ring_attention_forward_flash_attn_profile": "commdsl.attention.document",
        "sequence_parallel": "commdsl.attention.drop_in",
        "shard_sequence": "commdsl.attention.sequence",
        "unshard_sequence": "commdsl.attention.sequence",
        "zigzag": "commdsl.attention.placement",
        "zigzag_ring_attention_forward_flash_attn": "commdsl.attention.document",
        "zigzag_ring_attention_forward_flash_attn_profile": "commdsl.attention.document",
    },
)
