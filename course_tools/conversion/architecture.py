"""The sizes of a model with Llama's tensors, and the grids of ranks that divide them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.validation import check_counts

PAD_TO = 128  # Megatron's --make-vocab-size-divisible-by, for each tensor-parallel rank
EMBEDDING, NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
QKV, MLP = ([f"self_attn.{name}_proj" for name in "qkv"], [f"mlp.{name}_proj" for name in ("gate", "up", "down")])
NEEDED = {f"{name}.weight" for name in ["input_layernorm", "post_attention_layernorm", "self_attn.o_proj", *QKV, *MLP]}
# A layer has all of a row or none: biases, and Qwen3's norms over the width of one head.
OPTIONAL = [
    {f"{name}.bias" for name in QKV},
    {"self_attn.o_proj.bias"},
    {f"{name}.bias" for name in MLP},
    {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    """What decides how the tensors are split."""

    tensors: Shapes  # of a whole checkpoint, in which tied embeddings are one tensor
    layer: Shapes  # of any one layer, by their names in it
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """Ask transformers which tensors a model of this configuration has; they take no memory.

        Their names and shapes decide, whatever the model is called. Raises ValueError where they are not Llama's.
        """
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        first = "model.layers.0."
        layer = {name.removeprefix(first): shape for name, shape in shapes.items() if name.startswith(first)}
        layers = len({name.split(".")[2] for name in shapes if name.startswith("model.layers.")})
        every = {f"model.layers.{index}.{name}": shape for index in range(layers) for name, shape in layer.items()}
        odd = set(layer) ^ NEEDED.union(*(names for names in OPTIONAL if names & set(layer)))
        odd |= (set(shapes) - set(every)) ^ {EMBEDDING, NORM, OUTPUT}
        odd |= {name for name, shape in every.items() if shapes.get(name) != shape}  # not all layers are alike
        if not odd:
            heads = config.num_attention_heads
            head_dim = layer["self_attn.q_proj.weight"][0] // heads
            kv_heads = layer["self_attn.k_proj.weight"][0] // head_dim
            hidden = shapes[NORM][0]
            wanted = {
                "self_attn.o_proj.weight": (hidden, heads * head_dim),
                "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            }
            wanted |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (head_dim,))
            odd = {name for name, shape in wanted.items() if layer.get(name, shape) != shape}
        if odd:
            names = ", ".join(sorted(odd)[:3])
            raise ValueError(
                f"Only models with Llama's tensors are converted, and {config.model_type} differs in {names}."
            )
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        if tied:
            del shapes[OUTPUT]
        return cls(shapes, layer, layers, heads, kv_heads, head_dim, tied)

    @property
    def vocab(self) -> int:
        return self.tensors[EMBEDDING][0]

    @property
    def intermediate(self) -> int:
        return self.layer["mlp.up_proj.weight"][0]

    def padded_vocab(self, tp: int) -> int:
        """Return the rows of the embedding as Megatron pads them: the next multiple of 128 * tp."""
        return -(-self.vocab // (PAD_TO * tp)) * PAD_TO * tp

    def check_grid(self, tp: int, pp: int, *, padded: bool) -> None:
        """Raise ValueError, with the sizes that would do, if ``tp`` ranks or ``pp`` stages do not divide the model.

        A ``padded`` vocabulary always divides. More ranks than key/value heads are refused too: a head that is copied
        to several ranks must be kept equal during training, and the shards do not say whether it was.
        """
        check_counts(tp=tp, pp=pp)
        parts = {
            "attention heads": self.heads,
            "key/value heads (each rank needs whole ones of its own)": self.kv_heads,
            "columns of the MLP": self.intermediate,
        }
        if not padded:
            parts["rows of the vocabulary (layout megatron pads it)"] = self.vocab
        for what, size in parts.items():
            if size % tp:
                fits = [n for n in range(1, self.kv_heads + 1) if not any(s % n for s in parts.values())]
                raise ValueError(f"tp={tp} does not divide the model's {size:,} {what}: it may be {_either(fits)}.")
        if self.layers % pp:
            fits = [n for n in range(1, self.layers + 1) if self.layers % n == 0]
            raise ValueError(f"pp={pp} does not divide the model's {self.layers} layers: it may be {_either(fits)}.")


def compare(wanted: Shapes, found: Shapes, whose: str) -> None:
    """Raise ValueError for the first tensor that is missing, of another shape, or too many."""
    for name, shape in wanted.items():
        if name not in found:
            raise ValueError(f"{whose} lacks the tensor {name}.")
        if tuple(found[name]) != shape:
            raise ValueError(f"{whose} has {name} of shape {list(found[name])} instead of {list(shape)}.")
    for name in found:
        if name not in wanted:
            raise ValueError(f"{whose} has a tensor too many: {name}.")


def _either(numbers: list[int]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))
