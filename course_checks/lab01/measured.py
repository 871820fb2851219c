"""Bytes counted on real tensors, for the exercises that are held against a run: a block, a loss, a whole step."""

from __future__ import annotations

import torch

from course_lib.launch.threads import one_thread
from course_lib.models import tiny_llama
from course_lib.observe import MemoryProbe
from course_lib.observe.memory import SavedForBackward

Widths = tuple[int, int, int, int, int]  # hidden, heads, kv_heads, head_dim, intermediate


def block_activations(rows: int, length: int, widths: Widths, attention: str) -> int:
    """Bytes that autograd keeps of one block of a real Llama in fp32: of two blocks, less those of one."""
    with one_thread():
        return _kept(rows, length, widths, attention, 2) - _kept(rows, length, widths, attention, 1)


def _kept(rows: int, length: int, widths: Widths, attention: str, layers: int) -> int:
    from transformers import LlamaForCausalLM

    hidden, heads, kv_heads, head_dim, intermediate = widths
    config = tiny_llama(layers=layers, vocab=32, max_length=length, device="meta").config
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = hidden, heads, kv_heads
    config.head_dim, config.intermediate_size = head_dim, intermediate
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager" if attention == "eager" else "sdpa")
    saved = SavedForBackward(model)
    with saved:
        logits = model(torch.zeros(rows, length, dtype=torch.long)).logits
        assert logits.requires_grad
        return saved.now


def loss_peak(tokens: int, vocab: int, dtype: torch.dtype, held: bool) -> int:
    """The most bytes that logits and all that is made of them take, over forward and backward of a real loss."""
    hidden = torch.ones(tokens, 2, dtype=dtype, requires_grad=True)
    head = torch.ones(vocab, 2, dtype=dtype)
    labels = torch.zeros(tokens, dtype=torch.long)
    probe = MemoryProbe(torch.nn.Module())  # of no parameters: what is there before the loss does not count
    with one_thread(), probe.measure():
        logits = hidden @ head.T
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        if not held:
            del logits
        loss.backward()
    return probe.bytes["peak"]


def step_peak(layers: int, widths: Widths, vocab: int, rows: int, length: int) -> int:
    """Peak of the second step of a real Llama in fp32 under fused AdamW, bytes."""
    hidden, heads, kv_heads, head_dim, intermediate = widths
    assert head_dim == hidden // heads, "the course's tiny model has no head width of its own"
    model = tiny_llama(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        vocab=vocab,
        max_length=length,
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(rows, length, dtype=torch.long)

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    probe = MemoryProbe(model, optimizer)
    with one_thread():
        step()
        with probe.measure():
            step()
    return probe.bytes["peak"]
