"""What a panel looks like right now: the bodies of `GET /v1/state`, for people who watch.

Bounded in size whatever the panel is doing, and without anything of what users sent: no text, no pictures, no request
ids. Sequences are named by their number, which counts arrivals.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from shared.wire.common import WireModel

MAX_CELLS: Final = 4096
MAX_SEQUENCES: Final = 64
MAX_BLOCKS_OF_SEQUENCE: Final = 1024
MAX_STEPS: Final = 64
MAX_STEP_ROWS: Final = 64

# One character a cell: free, cached for a later prefix hit, private to one sequence, shared by several. Capitals: with
# an image in it.
CELLS: Final = ".cpsCPS"

Percentiles = Annotated[list[float], Field(min_length=3, max_length=3)]


class BlockMap(WireModel):
    """The KV cache's blocks.

    cells             one character of CELLS for every `blocks_per_cell` blocks, the liveliest of them
    waste             slots of held blocks with no token in them, over all slots of held blocks
    """

    num_blocks: int
    block_size: int
    num_free: int
    num_cached: int
    num_held: int
    num_shared: int
    num_evictions: int
    waste: float
    blocks_per_cell: int
    cells: str = Field(pattern=r"^[.cpsCPS]*$", max_length=MAX_CELLS)


class SequenceState(WireModel):
    """cells   where its blocks are in the map, in the order of its tokens"""

    number: int
    status: Literal["running", "waiting"]
    awaits_image: bool
    num_prompt_tokens: int
    num_image_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_tokens: int
    num_preemptions: int
    cells: list[int] = Field(max_length=MAX_BLOCKS_OF_SEQUENCE)


# What one sequence did in one step: its number, how many tokens, and what they were. decode: an answer's last token and
# drafts of the next; prefill: a piece of a prompt; image: one with rows of a picture in it. There can be thousands.
StepRow = tuple[int, int, Literal["prefill", "image", "decode"]]


class StepState(WireModel):
    number: int
    seconds: float
    num_rows: int
    num_tokens: int
    rows: list[StepRow] = Field(max_length=MAX_STEP_ROWS)


class EngineState(WireModel):
    """Of one text engine, between two steps.

    first_token, between_tokens   seconds at the 50th, 95th and 99th percentile of the last minute; None: no tokens came
    embeddings                    images by where their embedding came from, since start
    """

    kind: Literal["text_engine"] = "text_engine"
    model: str
    num_running: int
    num_waiting: int
    num_awaiting_image: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    first_token: Percentiles | None
    between_tokens: Percentiles | None
    embeddings: dict[str, int]
    blocks: BlockMap
    sequences: list[SequenceState] = Field(max_length=MAX_SEQUENCES)
    steps: list[StepState] = Field(max_length=MAX_STEPS)


class TowerPass(WireModel):
    number: int
    num_images: int
    seconds: float


class EncoderState(WireModel):
    """Of one vision encoder.

    images    by outcome, since start; see the metric encoder_images
    passes    the latest batches that went through the tower
    """

    kind: Literal["vision_encoder"] = "vision_encoder"
    model: str
    num_queued: int
    max_queued: int
    num_queued_bytes: int
    num_waiting_for_tower: int
    busy_s: float
    tower_s: float
    recent_bytes: int
    cache_is_up: bool
    images: dict[str, int]
    passes: list[TowerPass] = Field(max_length=MAX_STEPS)
