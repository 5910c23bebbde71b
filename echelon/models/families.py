"""The model types of Hugging Face's that can be read and written, as tables: see translate.py for what they mean."""

from __future__ import annotations

from typing import Any

from echelon.models.bert import BertConfig
from echelon.models.gpt import GPTConfig
from echelon.models.llama import LlamaConfig
from echelon.models.parts import RopeScaling
from echelon.models.presets import Config, nearest
from echelon.models.resnet import ResNetConfig
from echelon.models.translate import REQUIRED, Family
from echelon.models.vit import ViTConfig


def find(settings: dict[str, Any]) -> Family:
    """The family that a config.json belongs to."""
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        hint, known = nearest(str(kind), FAMILIES), ", ".join(FAMILIES)
        raise ValueError(f"config.json says model_type {kind!r}{hint}, but what can be loaded is {known}")
    if "quantization_config" in settings:
        raise ValueError("its weights are quantized (config.json has a quantization_config): load the original ones")
    return FAMILIES[kind]


def model_type(config: Config) -> str:
    """The model type as which a config can be saved."""
    if not isinstance(config, LlamaConfig):
        types = {GPTConfig: "gpt2", BertConfig: "bert", ViTConfig: "vit", ResNetConfig: "resnet"}
        if type(config) not in types or (isinstance(config, ResNetConfig) and config.small_stem):
            name = type(config).__name__.removesuffix("Config")
            raise ValueError(f"Hugging Face has no {name} as this one, so it cannot be saved as such")
        return types[type(config)]
    bias_on_all = config.qkv_bias == config.out_bias
    if config.qk_norm and bias_on_all and not config.mlp_bias:
        return "qwen3"
    if config.qkv_bias and not (config.qk_norm or config.out_bias or config.mlp_bias):
        return "qwen2"
    if bias_on_all and not config.qk_norm:
        return "llama"
    raise ValueError(
        f"no model of Hugging Face's has qk_norm={config.qk_norm} together with qkv_bias={config.qkv_bias}, "
        f"out_bias={config.out_bias} and mlp_bias={config.mlp_bias}, so this one cannot be saved as such"
    )


def _read_rope(settings: dict[str, Any]) -> dict[str, Any]:
    """As it is written since version 5 of transformers (`rope_parameters`), or before."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    fields = {"rope_theta": rope.get("rope_theta", settings.get("rope_theta", 10000.0))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return fields
    if kind != "llama3":
        raise ValueError(f"config.json scales rotary positions by {kind!r}; only 'llama3' is supported")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return fields | {"rope_scaling": RopeScaling(*(rope[key] for key in keys))}


def _write_rope(config: LlamaConfig) -> dict[str, Any]:
    """As it was written before version 5, which both read."""
    scaling = config.rope_scaling
    settings: dict[str, Any] = {"rope_theta": config.rope_theta, "attention_bias": config.qkv_bias}
    if scaling is not None:
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return settings


def _read_llama(settings: dict[str, Any]) -> dict[str, Any]:
    bias = settings.get("attention_bias", False)
    return _read_rope(settings) | {"qkv_bias": bias, "out_bias": bias}


def _read_qwen2(settings: dict[str, Any]) -> dict[str, Any]:
    return _read_rope(settings) | {"qkv_bias": True}


def _read_qwen3(settings: dict[str, Any]) -> dict[str, Any]:
    bias = settings.get("attention_bias", False)
    head_dim = settings.get("head_dim") or 128
    return _read_rope(settings) | {"qkv_bias": bias, "out_bias": bias, "qk_norm": True, "head_dim": head_dim}


def _llama(architecture: str, read: Any, **computed: tuple[Any, ...]) -> Family:
    block = "model.layers.{}"
    return Family(
        config=LlamaConfig,
        architecture=architecture,
        prefix="model.",
        names={
            "tokens": "model.embed_tokens",
            "norm": "model.norm",
            "head": "lm_head",
            "blocks.{}.attention_norm": f"{block}.input_layernorm",
            "blocks.{}.mlp_norm": f"{block}.post_attention_layernorm",
            "blocks.{}.attention.qkv": tuple(f"{block}.self_attn.{each}_proj" for each in "qkv"),
            "blocks.{}.attention.q_norm": f"{block}.self_attn.q_norm",
            "blocks.{}.attention.k_norm": f"{block}.self_attn.k_norm",
            "blocks.{}.attention.out": f"{block}.self_attn.o_proj",
            "blocks.{}.mlp.gate": f"{block}.mlp.gate_proj",
            "blocks.{}.mlp.up": f"{block}.mlp.up_proj",
            "blocks.{}.mlp.down": f"{block}.mlp.down_proj",
        },
        fields={
            "vocabulary": ("vocab_size", REQUIRED),
            "context": ("max_position_embeddings", 2048),
            "dim": ("hidden_size", REQUIRED),
            "layers": ("num_hidden_layers", REQUIRED),
            "heads": ("num_attention_heads", REQUIRED),
            "kv_heads": ("num_key_value_heads", None),
            "head_dim": ("head_dim", None),
            "mlp_dim": ("intermediate_size", REQUIRED),
            "norm_eps": ("rms_norm_eps", 1e-6),
            "mlp_bias": ("mlp_bias", False),
            "tied": ("tie_word_embeddings", False),
            "attention_dropout": ("attention_dropout", 0.0),
        },
        computed={"hidden_act": ("silu",), **computed},
        unused=r"rotary_emb\.inv_freq$",
        read_more=read,
        write_more=_write_rope,
    )


_GPT2 = Family(
    config=GPTConfig,
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    names={
        "tokens": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
        "blocks.{}.mlp_norm": "transformer.h.{}.ln_2",
        "blocks.{}.attention.qkv": "transformer.h.{}.attn.c_attn",
        "blocks.{}.attention.out": "transformer.h.{}.attn.c_proj",
        "blocks.{}.mlp.up": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.mlp.down": "transformer.h.{}.mlp.c_proj",
    },
    fields={
        "vocabulary": ("vocab_size", 50257),
        "context": ("n_positions", 1024),
        "dim": ("n_embd", 768),
        "layers": ("n_layer", 12),
        "heads": ("n_head", 12),
        "mlp_dim": ("n_inner", None),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
        "dropout": ("resid_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
    },
    computed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    unused=r"\.attn\.(masked_)?bias$",
    transposed=True,
    write_more=lambda config: {"embd_pdrop": config.dropout},
)

_ENCODER_FIELDS = {
    "dim": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "mlp_dim": ("intermediate_size", 3072),
    "norm_eps": ("layer_norm_eps", 1e-12),
}


def _encoder_names(block: str, attention: str) -> dict[str, Any]:
    """What BERT and ViT name alike."""
    return {
        "blocks.{}.attention.qkv": tuple(f"{block}.attention.{attention}.{each}" for each in ("query", "key", "value")),
        "blocks.{}.attention.out": f"{block}.attention.output.dense",
        "blocks.{}.mlp.up": f"{block}.intermediate.dense",
        "blocks.{}.mlp.down": f"{block}.output.dense",
    }


_BERT = Family(
    config=BertConfig,
    architecture="BertForMaskedLM",
    prefix="bert.",
    names={
        "tokens": "bert.embeddings.word_embeddings",
        "positions": "bert.embeddings.position_embeddings",
        "segments": "bert.embeddings.token_type_embeddings",
        "embedding_norm": "bert.embeddings.LayerNorm",
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head.weight": "cls.predictions.decoder.weight",
        "head.bias": "cls.predictions.bias",
        "blocks.{}.attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
        "blocks.{}.mlp_norm": "bert.encoder.layer.{}.output.LayerNorm",
        **_encoder_names("bert.encoder.layer.{}", "self"),
    },
    fields={
        **_ENCODER_FIELDS,
        "vocabulary": ("vocab_size", 30522),
        "context": ("max_position_embeddings", 512),
        "segments": ("type_vocab_size", 2),
        "tied": ("tie_word_embeddings", True),
        "dropout": ("hidden_dropout_prob", 0.1),
        "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    },
    computed={"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,)},
    names_untied={"head.bias": "cls.predictions.decoder.bias"},
    unused=r"^bert\.pooler\.|^cls\.seq_relationship\.|\.position_ids$|^cls\.predictions\.(decoder\.)?bias$",
)


def _read_classes(settings: dict[str, Any]) -> dict[str, Any]:
    return {"classes": len(settings["id2label"]) if "id2label" in settings else settings.get("num_labels", 2)}


def _write_classes(config: ViTConfig | ResNetConfig) -> dict[str, Any]:
    names = [f"LABEL_{number}" for number in range(config.classes)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


_VIT = Family(
    config=ViTConfig,
    architecture="ViTForImageClassification",
    prefix="vit.",
    names={
        "patches": "vit.embeddings.patch_embeddings.projection",
        "class_token": "vit.embeddings.cls_token",
        "position_table": "vit.embeddings.position_embeddings",
        "norm": "vit.layernorm",
        "head": "classifier",
        "blocks.{}.attention_norm": "vit.encoder.layer.{}.layernorm_before",
        "blocks.{}.mlp_norm": "vit.encoder.layer.{}.layernorm_after",
        **_encoder_names("vit.encoder.layer.{}", "attention"),
    },
    fields={
        **_ENCODER_FIELDS,
        "image": ("image_size", 224),
        "patch": ("patch_size", 16),
        "channels": ("num_channels", 3),
        "qkv_bias": ("qkv_bias", True),
        "dropout": ("hidden_dropout_prob", 0.0),
        "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    },
    computed={"hidden_act": ("gelu",)},
    unused=r"^vit\.pooler\.",
    read_more=_read_classes,
    write_more=_write_classes,
)


def _convolution(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.conv": f"{theirs}.convolution", f"{ours}.norm": f"{theirs}.normalization"}


_RESNET = Family(
    config=ResNetConfig,
    architecture="ResNetForImageClassification",
    prefix="resnet.",
    names={
        **_convolution("stem", "resnet.embedder.embedder"),
        **_convolution("stages.{}.{}.layers.{}", "resnet.encoder.stages.{}.layers.{}.layer.{}"),
        **_convolution("stages.{}.{}.shortcut", "resnet.encoder.stages.{}.layers.{}.shortcut"),
        "head": "classifier.1",
    },
    fields={
        "channels": ("num_channels", 3),
        "stem_dim": ("embedding_size", 64),
        "dims": ("hidden_sizes", (256, 512, 1024, 2048)),
        "depths": ("depths", (3, 4, 6, 3)),
    },
    computed={
        "hidden_act": ("relu",),
        "downsample_in_first_stage": (False,),
        "downsample_in_bottleneck": (False,),
    },
    unused=r"(?!)",
    read_more=lambda settings: (
        _read_classes(settings) | {"bottleneck": settings.get("layer_type", "bottleneck") == "bottleneck"}
    ),
    write_more=lambda config: _write_classes(config) | {"layer_type": "bottleneck" if config.bottleneck else "basic"},
)

FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "llama": _llama("LlamaForCausalLM", _read_llama),
    "qwen2": _llama("Qwen2ForCausalLM", _read_qwen2, use_sliding_window=(False,)),
    "qwen3": _llama("Qwen3ForCausalLM", _read_qwen3, use_sliding_window=(False,)),
    "bert": _BERT,
    "vit": _VIT,
    "resnet": _RESNET,
}
