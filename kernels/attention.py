"""Causal grouped-query attention of new tokens over the cache: softmax(q k^T / sqrt(D)) v.

q [T, Hq, D]; keys, values [Hkv, S, D] of which the rows up to each token's own position are valid; positions
int64 [T], ascending. Query head h reads KV head h // (Hq / Hkv): the group shares its keys, nothing is repeated.
Output [T, Hq * D] in q's dtype, computed in fp32. One token moves 2 * Hkv * length * D elements of the cache.
"""

import torch
from torch import Tensor

# Scores held at once, in fp32 elements (256 MB): queries are taken in blocks so that memory does not grow with T * S.
_MAX_SCORES = 64 * 1024 * 1024


def attention_reference(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """-> [T, Hq * D] in q's dtype."""
    tokens, q_heads, _ = q.shape
    length = int(positions[-1]) + 1
    k, v = keys[:, :length].float(), values[:, :length].float()
    if tokens == 1:  # sees the whole cache
        return _attend(q.float(), k, v, None).to(q.dtype)
    block = max(1, _MAX_SCORES // (q_heads * length))
    starts = range(0, tokens, block)
    heads = [_attend(q[i : i + block].float(), k, v, positions[i : i + block]) for i in starts]
    return torch.cat(heads).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
    """A block of queries [t, Hq, D] over k, v [Hkv, L, D] -> [t, Hq * D]; without positions nothing is hidden."""
    (tokens, _, head_dim), (kv_heads, length, _) = q.shape, k.shape
    group = q.view(tokens, kv_heads, -1, head_dim).transpose(0, 1)  # [Hkv, t, Hq / Hkv, D]
    scores = (group * head_dim**-0.5).reshape(kv_heads, -1, head_dim) @ k.transpose(1, 2)
    if positions is not None:
        hidden = torch.arange(length, device=q.device) > positions[:, None]
        scores.view(kv_heads, tokens, -1, length).masked_fill_(hidden[None, :, None], float("-inf"))
    heads: Tensor = scores.softmax(-1) @ v
    return heads.view(kv_heads, tokens, -1, head_dim).transpose(0, 1).reshape(tokens, -1)
