"""Small random models of `transformers`, one for each shape that is read and written, with inputs for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_IMAGES = {"num_labels": 7, "num_channels": 3}

# The class of the model and its config's arguments; what is left out is the default of `transformers`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": 96, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt2 untied, n_inner": (
        "GPT2",
        {
            "vocab_size": 96,
            "n_positions": 40,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_inner": 40,
            "tie_word_embeddings": False,
        },
    ),
    "llama 2": ("Llama", {**_SMALL, "rms_norm_eps": 1e-5}),
    "llama 3": ("Llama", {**_SMALL, "num_key_value_heads": 2, "rope_parameters": _LLAMA3_ROPE}),
    "llama 3.2": ("Llama", {**_SMALL, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", {**_SMALL, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "qwen 2": ("Qwen2", {**_SMALL, "num_key_value_heads": 2}),
    "qwen 2 tied": ("Qwen2", {**_SMALL, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen 3": ("Qwen3", {**_SMALL, "num_key_value_heads": 2, "head_dim": 16}),
    "qwen 3 tied": ("Qwen3", {**_SMALL, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}),
    "bert": ("Bert", {**_SMALL, "max_position_embeddings": 40}),
    "bert untied": ("Bert", {**_SMALL, "max_position_embeddings": 40, "tie_word_embeddings": False}),
    "vit": ("ViT", {**_SMALL, **_IMAGES, "image_size": 24, "patch_size": 4}),
    "vit without qkv_bias": ("ViT", {**_SMALL, **_IMAGES, "image_size": 24, "patch_size": 8, "qkv_bias": False}),
    "resnet, basic": (
        "ResNet",
        {**_IMAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
    ),
    "resnet, bottleneck": (
        "ResNet",
        {**_IMAGES, "embedding_size": 8, "hidden_sizes": [32, 64], "depths": [2, 2], "layer_type": "bottleneck"},
    ),
}
_TASKS = {
    "Bert": "ForMaskedLM",
    "ViT": "ForImageClassification",
    "ResNet": "ForImageClassification",
    "GPT2": "LMHeadModel",
}


def reference(case: str, seed: int = 0) -> nn.Module:
    """A model with random values everywhere, also where first values would be zeros and ones."""
    kind, arguments = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**arguments)
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, kind + _TASKS.get(kind, "ForCausalLM"))(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.add_(torch.rand_like(tensor) * 0.5 if tensor.dim() == 1 else torch.randn_like(tensor) * 0.1)
    return model.eval()


def inputs(case: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if CASES[case][0] in ("ViT", "ResNet"):
        return torch.randn(3, 3, 24, 24, generator=generator)
    return torch.randint(96, (3, 37), generator=generator)


def logits(model: nn.Module, *arguments: Tensor, **more: Tensor) -> Tensor:
    """Of ours or of theirs."""
    with torch.no_grad():
        out = model(*arguments, **more)
    return out if isinstance(out, Tensor) else out.logits
