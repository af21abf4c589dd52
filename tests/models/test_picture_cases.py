"""User faults about pictures that only a whole model shows, each compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from structlog.testing import capture_logs

from services.text_engine.chat_template import VICUNA, ChatTemplate
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.preprocessing.anyres import AnyRes
from tests.checkpoints import NUM_TEXT_TOKENS
from tests.conftest import CheckpointFactory
from tests.llava_checkpoints import load_processor
from tests.models.oracle import load_oracle
from tests.models.split_system import NUM_NEW_TOKENS, SplitSystem, picture

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def quadrants(width: int, height: int) -> Image.Image:
    """Red and green above, blue and white below."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    image.paste(WHITE, (width // 2, height // 2, width, height))
    return image


@pytest.mark.parametrize(("size", "grid"), [((400, 900), (3, 1)), ((900, 400), (1, 3))])
def test_a_tall_picture_is_cut_from_top_to_bottom_and_a_wide_one_from_left_to_right(
    checkpoint: CheckpointFactory, size: tuple[int, int], grid: tuple[int, int]
):
    """Case C3, in LLaVA-1.6's real geometry: tiles of 336, the best grid 1008 x 336 (height x width) or 336 x 1008."""
    preprocessing = load_family(checkpoint("llava_next_336")).preprocessing
    assert isinstance(preprocessing, AnyRes)
    assert preprocessing.num_tiles(*size) == grid
    whole, *tiles = preprocessing.apply(quadrants(*size))
    assert whole.shape == (3, 336, 336)
    colours = [tuple(int(value) for value in whole[:, y, x]) for y in (80, 250) for x in (80, 250)]
    assert colours == [RED, GREEN, BLUE, WHITE]
    # The first tile shows the picture's beginning, the last one its end: top and bottom, or left and right.
    first, last = (({*map(tuple, tile.reshape(3, -1).T.tolist())}) for tile in (tiles[0], tiles[-1]))
    begins, ends = ({RED, GREEN}, {BLUE, WHITE}) if grid == (3, 1) else ({RED, BLUE}, {GREEN, WHITE})
    assert begins <= first
    assert ends <= last
    assert not ends & first
    assert not begins & last


@pytest.mark.parametrize("penalty", [1.05, 1.4])
@pytest.mark.parametrize("name", ["llava_clip_mistral", "llava_next_vicuna", "llava_onevision"])
def test_repetition_penalty_beside_a_picture_is_that_of_transformers(
    checkpoint: CheckpointFactory, name: str, penalty: float
):
    """Case C20: the many placeholders neither trip the penalty nor distort it; text alone is as before."""
    folder = checkpoint(name)
    system, oracle, processor = SplitSystem(folder), load_oracle(folder), load_processor(folder)
    oracle.generation_config.suppress_tokens = [*range(NUM_TEXT_TOKENS, oracle.config.text_config.vocab_size)]
    for parts in (["What is shown?", picture(97, 61)], ["No picture at all, and no picture at all."]):
        images = [part for part in parts if not isinstance(part, str)]
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=text, images=images or None, return_tensors="pt")
        output = oracle.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, repetition_penalty=penalty)
        expected = output[0, inputs["input_ids"].shape[1] :].tolist()
        assert system.answer(parts, repetition_penalty=penalty).token_ids == expected


def test_a_known_family_without_a_template_gets_the_built_in_one_and_the_log_says_so(
    checkpoint: CheckpointFactory, tmp_path: Path
):
    """Case C8."""
    config = json.loads((checkpoint("llava_clip_llama") / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with capture_logs() as lines:
        template = ChatTemplate.load(tmp_path, model_type="llava", bos_token="", eos_token="</s>")
    assert template is not None
    messages = [{"role": "user", "content": "What is it?"}]
    built_in = ChatTemplate(VICUNA, bos_token="", eos_token="</s>")
    assert template.render(messages, None) == built_in.render(messages, None)
    assert [line["family"] for line in lines if "no chat template" in line["event"]] == ["llava"]


@pytest.mark.parametrize("size", [(30, 150), (150, 30)])
def test_pictures_of_the_same_pixels_and_another_shape_are_others(checkpoint: CheckpointFactory, size: tuple[int, int]):
    """Case E4, as it was reported: 30 x 150 and 150 x 30 built from the same bytes."""
    system = SplitSystem(checkpoint("llava_clip_mistral"))
    raw = np.random.default_rng(4).integers(0, 256, 30 * 150 * 3, dtype=np.uint8)
    one, other = (Image.fromarray(raw.reshape(h, w, 3)) for w, h in (size, size[::-1]))
    answers = [system.prompt(["What?", image]).image_refs[0].image_key for image in (one, other)]
    assert len(set(answers)) == 2
    assert not np.array_equal(system.encode(one).numpy(), system.encode(other).numpy())
