"""The tables of a draft tree that other engines' attention and verification use, by their names."""

from __future__ import annotations

import numpy as np

from engine.tree import TreeShape

WORD = 32


def tree_buffers(shape: TreeShape) -> dict[str, list[int] | list[list[int]]]:
    """The tables of a tree by their names in TensorRT-LLM, Medusa and EAGLE, and SGLang.

    Bit j of a row's packed mask: the row attends to row j. Bit 0 of the first int32 is the root.
    Paths to the leaves are ordered from the last leaf to the first, padded with -1, which also
    stands for a missing child or sibling.

    Worked example, parents `[-1, 0, 0, 1]`:

        spec_decoding_packed_mask       [[1], [3], [5], [11]]
        spec_decoding_position_offsets  [0, 1, 1, 2]
        retrieve_indices                [[0, 1, 3], [0, 2, -1]]
        retrieve_next_token             [1, 3, -1, -1]
        retrieve_next_sibling           [-1, 2, -1, -1]

    Source: tensorrt_llm/runtime/medusa_utils.py; medusa/model/utils.py; sglang/srt/speculative.
    """
    bits = np.zeros((len(shape), -(-len(shape) // WORD) * WORD), dtype=bool)
    bits[:, : len(shape)] = shape.ancestors.numpy()
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    leaves = [node for node, below in enumerate(shape.children) if not below]
    paths = [[0, *shape.path_to(leaf)] for leaf in reversed(leaves)]
    next_sibling = [-1] * len(shape)
    for siblings in shape.children:
        for node, after in zip(siblings, siblings[1:], strict=False):
            next_sibling[node] = after
    return {
        "spec_decoding_packed_mask": words.tolist(),
        "spec_decoding_position_offsets": shape.depths.tolist(),
        "retrieve_indices": [path + [-1] * (shape.max_depth + 1 - len(path)) for path in paths],
        "retrieve_next_token": [below[0] if below else -1 for below in shape.children],
        "retrieve_next_sibling": next_sibling,
    }
