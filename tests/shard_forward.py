"""A Llama's or Qwen's forward pass on its shards in one process, written apart from course_tools.conversion.

Every tensor-parallel rank's part is computed by itself, partial sums are added by hand, stage after stage.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MEGATRON = {
    "embedding": "embedding.word_embeddings",
    "output": "output_layer",
    "last_norm": "decoder.final_layernorm.weight",
    "layer": "decoder.layers.{}.",
    "norm_1": "self_attention.linear_qkv.layer_norm_weight",
    "norm_2": "mlp.linear_fc1.layer_norm_weight",
    "q_norm": "self_attention.q_layernorm.weight",
    "k_norm": "self_attention.k_layernorm.weight",
    "out": "self_attention.linear_proj",
    "down": "mlp.linear_fc2",
}
HUGGING_FACE = {
    "embedding": "model.embed_tokens",
    "output": "lm_head",
    "last_norm": "model.norm.weight",
    "layer": "model.layers.{}.",
    "norm_1": "input_layernorm.weight",
    "norm_2": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj",
    "down": "mlp.down_proj",
}


def forward(shards, config, ids, *, tp, pp, layout):
    """Logits [batch, length, vocab] of token ids [batch, length]."""
    names = MEGATRON if layout == "megatron" else HUGGING_FACE
    per_stage = config.num_hidden_layers // pp
    x = 0
    for rank in range(tp):  # each rank looks up the tokens in its rows of the vocabulary, and zeros for the others
        table = shards[rank, 0][names["embedding"] + ".weight"]
        mine = (ids >= rank * len(table)) & (ids < (rank + 1) * len(table))
        x = x + table[(ids - rank * len(table)).clamp(0, len(table) - 1)] * mine[..., None]
    for stage in range(pp):
        for layer in range(per_stage):
            before = names["layer"].format(layer)
            ranks = [{k.removeprefix(before): v for k, v in shards[r, stage].items()} for r in range(tp)]
            x = x + added(
                [attention(s, names, config, x, tp, layout) for s in ranks], ranks[0].get(names["out"] + ".bias")
            )
            x = x + added([mlp(s, names, config, x, layout) for s in ranks], ranks[0].get(names["down"] + ".bias"))
    last = [shards[rank, pp - 1] for rank in range(tp)]
    x = rms(x, last[0][names["last_norm"]], config)
    where = names["output"] if names["output"] + ".weight" in last[0] else names["embedding"]
    return torch.cat([x @ shard[where + ".weight"].T for shard in last], dim=-1)[..., : config.vocab_size]


def added(partial_sums, bias):
    total = sum(partial_sums)
    return total if bias is None else total + bias  # once, and not on every rank


def rms(x, weight, config):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weight


def linear(shard, name, x):
    return F.linear(x, shard[name + ".weight"], shard.get(name + ".bias"))


def rotated(x, config):
    """x [batch, heads, length, width]: the two halves of a head turn against each other."""
    width = x.shape[-1]
    speed = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    angle = torch.arange(x.shape[2])[:, None] * speed
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


def attention(shard, names, config, x, tp, layout):
    batch, length, _ = x.shape
    heads, groups = config.num_attention_heads // tp, config.num_key_value_heads // tp
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    x = rms(x, shard[names["norm_1"]], config)
    if layout == "megatron":  # as attention.py of Megatron-core takes its fused projection apart
        mixed = linear(shard, "self_attention.linear_qkv", x).view(batch, length, groups, (heads // groups + 2) * width)
        q, k, v = mixed.split([heads // groups * width, width, width], dim=3)
    else:
        q, k, v = (linear(shard, f"self_attn.{which}_proj", x) for which in "qkv")
    q, k, v = (t.reshape(batch, length, -1, width) for t in (q, k, v))
    if names["q_norm"] in shard:
        q, k = rms(q, shard[names["q_norm"]], config), rms(k, shard[names["k_norm"]], config)
    q, k, v = rotated(q.transpose(1, 2), config), rotated(k.transpose(1, 2), config), v.transpose(1, 2)
    k, v = k.repeat_interleave(heads // groups, dim=1), v.repeat_interleave(heads // groups, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
    return mixed @ shard[names["out"] + ".weight"].T


def mlp(shard, names, config, x, layout):
    x = rms(x, shard[names["norm_2"]], config)
    if layout == "megatron":
        gate, up = linear(shard, "mlp.linear_fc1", x).chunk(2, dim=-1)
    else:
        gate, up = linear(shard, "mlp.gate_proj", x), linear(shard, "mlp.up_proj", x)
    return (F.silu(gate) * up) @ shard[names["down"] + ".weight"].T
