"""The tiny checkpoints are good oracles: transformers loads every layout alike and their greedy output varies."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from tests.checkpoints import LLAVA_RECIPES, RECIPES, TEXT_RECIPES
from tests.conftest import CheckpointFactory

PROMPT_LENGTH = 20
NUM_NEW_TOKENS = 24


def _load(folder):
    auto = AutoModelForImageTextToText if "llava" in folder.name else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


def _greedy(model, prompt):
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, prompt.shape[1] :].tolist(), torch.cat(output.logits)


@pytest.mark.parametrize("name", RECIPES)
def test_greedy_output_wanders_and_its_best_two_logits_are_apart(checkpoint: CheckpointFactory, name: str):
    prompt = torch.arange(3, 3 + 7 * PROMPT_LENGTH, 7)[None]
    tokens, logits = _greedy(_load(checkpoint(name)), prompt)
    best, second = logits.topk(2).values.unbind(-1)
    assert len(set(tokens)) >= NUM_NEW_TOKENS // 3
    assert (best - second).min() > 3e-4  # ten times the fp32 noise at these sizes


@pytest.mark.parametrize("name", ["llama_rope_yarn", "qwen2_window_upper_layers", "mistral", *LLAVA_RECIPES])
def test_every_layout_is_the_same_model_to_transformers(checkpoint: CheckpointFactory, name: str):
    prompt = torch.arange(3, 300, 2)[None]
    want = _load(checkpoint(name, layout="transformers"))(input_ids=prompt).logits
    layouts = ["published"] if name in TEXT_RECIPES else ["published", "nested"]
    for layout in layouts:
        got = _load(checkpoint(name, layout=layout))(input_ids=prompt).logits
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_small_shard_size_gives_several_files_with_an_index(checkpoint: CheckpointFactory):
    folder = checkpoint("llava_clip_llama", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert (folder / "model.safetensors.index.json").exists()
    prompt = torch.arange(3, 60)[None]
    want = _load(checkpoint("llava_clip_llama"))(input_ids=prompt).logits
    torch.testing.assert_close(_load(folder)(input_ids=prompt).logits, want, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["published", "transformers", "nested"])
@pytest.mark.parametrize("name", LLAVA_RECIPES)
def test_the_processor_renders_images_where_they_stand_and_the_model_answers(
    checkpoint: CheckpointFactory, name: str, layout: str
):
    folder = checkpoint(name, layout=layout)
    processor = AutoProcessor.from_pretrained(folder)
    image = Image.new("RGB", (80, 60), (200, 30, 30))
    content = [{"type": "text", "text": "a"}, {"type": "image", "image": image}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<image>\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = processor(text=text, images=image, return_tensors="pt")
    model = _load(folder)
    num_placeholders = int((inputs["input_ids"] == model.config.image_token_id).sum())
    assert num_placeholders == model.config.image_seq_length
    assert torch.isfinite(model(**inputs).logits).all()


@pytest.mark.parametrize("layout", ["published", "transformers"])
def test_the_text_tokenizer_has_the_template_too(checkpoint: CheckpointFactory, layout: str):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("qwen2", layout=layout))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "größer 🙂"}], tokenize=False)
    assert text == "<|im_start|>user\ngrößer 🙂<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
