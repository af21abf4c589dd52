"""Writes a checkpoint as a Hugging Face LlavaForConditionalGeneration folder, bf16."""
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from .codebook import HIDDEN
from .drawing import SIZE
from .labels import NUM_PATCHES, PATCH
from .network import (
    DIM,
    HEAD_DIM,
    HEADS,
    MEAN,
    ROPE_THETA,
    STD,
    TEXT_HEADS,
    TEXT_LAYERS,
    TEXT_MLP,
    TOWER_LAYERS,
)
from .tokenizer import END, IMAGE, PAD, SPECIAL, VOCAB_SIZE

State = dict[str, torch.Tensor]
MAX_POSITIONS = 2048
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] if part['type'] in ['image', 'image_url', 'input_image'] -%}
{{- '<image>\\n' -}}
{%- endfor -%}
{%- for part in message['content'] if part['type'] in ['text', 'input_text'] -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def tower_state(tower: State) -> State:
    """The tower under CLIPVisionModel's names, with a last layer that vision_feature_layer -2 never uses: an identity of zeros."""
    pre = "vision_tower.vision_model."
    out = {f"{pre}embeddings.class_embedding": tower["cls"], f"{pre}embeddings.position_embedding.weight": tower["pos"],
           f"{pre}embeddings.patch_embedding.weight": tower["patch.weight"].view(DIM, 3, PATCH, PATCH),
           f"{pre}pre_layrnorm.weight": tower["ln.weight"], f"{pre}pre_layrnorm.bias": tower["ln.bias"]}
    names = {"out": "self_attn.out_proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2", "ln1": "layer_norm1", "ln2": "layer_norm2"}
    for i in range(TOWER_LAYERS + 1):
        for kind in ("weight", "bias"):
            block = {n: tower[f"blocks.{min(i, TOWER_LAYERS - 1)}.{n}.{kind}"] for n in ("qkv", *names)}
            if i == TOWER_LAYERS:
                block = {n: torch.ones_like(t) if n[:2] == "ln" and kind == "weight" else torch.zeros_like(t) for n, t in block.items()}
            layer = f"{pre}encoder.layers.{i}."
            for j, n in enumerate(("q_proj", "k_proj", "v_proj")):
                out[f"{layer}self_attn.{n}.{kind}"] = block["qkv"][j * DIM:(j + 1) * DIM]
            out |= {f"{layer}{name}.{kind}": block[n] for n, name in names.items()}
    return out | {f"{pre}post_layernorm.weight": torch.ones(DIM), f"{pre}post_layernorm.bias": torch.zeros(DIM)}


def text_state(text: State) -> State:
    """The text model under Llama's names."""
    pre, width = "language_model.model.", TEXT_HEADS * HEAD_DIM
    out = {f"{pre}embed_tokens.weight": text["embed.weight"], f"{pre}norm.weight": text["norm"],
           "language_model.lm_head.weight": text["lm_head.weight"]}
    for i in range(TEXT_LAYERS):
        get, layer = (lambda n, i=i: text[f"layers.{i}.{n}"]), f"{pre}layers.{i}."
        for j, n in enumerate(("q_proj", "k_proj", "v_proj")):
            out[f"{layer}self_attn.{n}.weight"] = get("qkv.weight")[j * width:(j + 1) * width]
        out[f"{layer}self_attn.o_proj.weight"] = get("out.weight")
        out[f"{layer}mlp.gate_proj.weight"], out[f"{layer}mlp.up_proj.weight"] = get("gate_up.weight").chunk(2)
        out[f"{layer}mlp.down_proj.weight"] = get("down.weight")
        out[f"{layer}input_layernorm.weight"], out[f"{layer}post_attention_layernorm.weight"] = get("norm1"), get("norm2")
    return out


def config() -> dict:
    """config.json."""
    vision = {
        "model_type": "clip_vision_model", "hidden_size": DIM, "intermediate_size": 4 * DIM, "num_attention_heads": HEADS,
        "num_hidden_layers": TOWER_LAYERS + 1, "image_size": SIZE, "patch_size": PATCH, "num_channels": 3, "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5, "attention_dropout": 0.0, "initializer_factor": 1.0, "initializer_range": 0.02, "projection_dim": DIM,
    }
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    text = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN,
        "intermediate_size": TEXT_MLP, "num_hidden_layers": TEXT_LAYERS, "num_attention_heads": TEXT_HEADS,
        "num_key_value_heads": TEXT_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITIONS, "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True, "dtype": "bfloat16",
    } | ends
    return {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "dtype": "bfloat16", "image_token_id": IMAGE,
        "image_token_index": IMAGE, "image_seq_length": NUM_PATCHES, "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu", "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False, "text_config": text, "vision_config": vision,
    } | ends


def processor_files() -> dict[str, dict]:
    """Everything around the weights, by file name."""
    side = {"height": SIZE, "width": SIZE}
    image = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": SIZE}, "resample": 3,
        "do_center_crop": True, "crop_size": side, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": list(MEAN), "image_std": list(STD), "do_convert_rgb": True,
    }
    processor = {"processor_class": "LlavaProcessor"}
    return {
        "config.json": config(),
        "generation_config.json": {"eos_token_id": END, "pad_token_id": PAD, "do_sample": False, "max_new_tokens": 64},
        "preprocessor_config.json": image | processor,
        "processor_config.json": processor | {
            "image_processor": image, "image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
        },
        "tokenizer_config.json": processor | {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[END], "pad_token": SPECIAL[PAD],
            "model_max_length": MAX_POSITIONS, "clean_up_tokenization_spaces": False,
            "extra_special_tokens": {"image_token": "<image>"},
        },
    }


def export(checkpoint: Path, tokenizer: Path, out: Path) -> None:
    """Write the model folder."""
    saved = torch.load(checkpoint)
    state = tower_state(saved["tower"]) | text_state(saved["text"])
    state |= {f"multi_modal_projector.{k}": v for k, v in saved["projector"].items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().to(torch.bfloat16).contiguous().clone() for k, v in sorted(state.items())}, out / "model.safetensors",
              metadata={"format": "pt"})
    for name, content in processor_files().items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shutil.copyfile(tokenizer, out / "tokenizer.json")
