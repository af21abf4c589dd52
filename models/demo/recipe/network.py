"""The three parts of the model, written lean for training on a CPU; export.py gives them their Hugging Face names."""
import torch
import torch.nn.functional as F
from torch import nn

from .codebook import HIDDEN
from .concepts import CHARS
from .labels import ATTRIBUTES, CLASSES, GRID, NUM_PATCHES, PATCH
from .words import MAX_LETTERS

DIM, HEADS, TOWER_LAYERS = 256, 4, 6
TEXT_LAYERS, TEXT_HEADS, TEXT_MLP, HEAD_DIM, ROPE_THETA = 6, 4, 1024, 64, 1e6
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Plain attention; on a CPU its backward beats the fused one.

    q, k, v [batch, heads, length, head_dim]; mask [batch, length, length] additive; returns [batch, length, heads * head_dim].
    """
    b, h, n, d = q.shape
    flat = (t.reshape(b * h, n, d) for t in (q * d**-0.5, k, v))
    q, k, v = flat
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, h, n, n).float()
    if mask is not None:
        scores = scores + mask[:, None]
    weights = torch.softmax(scores, -1).to(v.dtype).view(b * h, n, n)
    return torch.bmm(weights, v).view(b, h, n, d).transpose(1, 2).reshape(b, n, h * d)


class TowerBlock(nn.Module):
    """One CLIP encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, n, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(attend(q, k, v))
        h = self.fc1(self.ln2(x))
        return x + self.fc2(h * torch.sigmoid(1.702 * h))


class Tower(nn.Module):
    """CLIPVisionModel without its class token in the output and without a last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(3 * PATCH * PATCH, DIM, bias=False)
        self.cls = nn.Parameter(torch.randn(DIM) * 0.02)
        self.pos = nn.Parameter(torch.randn(NUM_PATCHES + 1, DIM) * 0.02)
        self.ln = nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList(TowerBlock() for _ in range(TOWER_LAYERS))
        for m in self.modules():
            if isinstance(m, TowerBlock):
                for w in (m.out, m.fc2):
                    nn.init.normal_(w.weight, std=0.02 / (2 * TOWER_LAYERS) ** 0.5)
                    nn.init.zeros_(w.bias)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [batch, 128, 128, 3] uint8 -> patch features [batch, 64, 256]."""
        b = pixels.shape[0]
        x = (pixels.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        x = x.view(b, GRID, PATCH, GRID, PATCH, 3).permute(0, 1, 3, 5, 2, 4).reshape(b, NUM_PATCHES, 3 * PATCH * PATCH)
        x = self.patch(x.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") else x)
        x = torch.cat([self.cls.to(x.dtype).expand(b, 1, DIM), x], 1) + self.pos.to(x.dtype)
        x = self.ln(x)
        for block in self.blocks:
            x = block(x)
        return x[:, 1:]


class Projector(nn.Module):
    """LLaVA's two-layer GELU projector, tower features [..., 256] -> text embeddings [..., 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        nn.init.zeros_(self.linear_2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))


class Heads(nn.Module):
    """Linear read-outs of the dense labels; used in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(DIM)
        self.sizes = [*ATTRIBUTES.values(), len(CHARS), MAX_LETTERS, 4]
        self.patch = nn.Linear(DIM, sum(self.sizes))
        self.picture = nn.Linear(DIM, len(CLASSES))

    def forward(self, normed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits of each group for normed patch features [n, 256]; 'geometry' is [n, 4]."""
        parts = self.patch(normed).float().split(self.sizes, -1)
        return dict(zip((*ATTRIBUTES, "chars", "order", "geometry"), parts))


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Llama's norm over the last axis."""
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight.to(x.dtype)


def rope_table(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [length, head_dim] of rotary positions."""
    inv = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    f = torch.outer(torch.arange(length).float(), inv)
    return torch.cat([f, f], -1).cos(), torch.cat([f, f], -1).sin()


class TextLayer(nn.Module):
    """One Llama layer."""

    def __init__(self) -> None:
        super().__init__()
        width = TEXT_HEADS * HEAD_DIM
        self.norm1, self.norm2 = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.ones(HIDDEN))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * width, bias=False), nn.Linear(width, HIDDEN, bias=False)
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * TEXT_MLP, bias=False), nn.Linear(TEXT_MLP, HIDDEN, bias=False)
        for w in (self.out, self.down):
            nn.init.normal_(w.weight, std=0.02 / (2 * TEXT_LAYERS) ** 0.5)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x [batch, length, 256]; cos, sin [batch, 1, length, 64]; mask [batch, length, length] additive."""
        b, n, _ = x.shape
        q, k, v = self.qkv(rms_norm(x, self.norm1)).view(b, n, 3, TEXT_HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4).unbind(0)
        half = HEAD_DIM // 2
        q, k = (t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin for t in (q, k))
        x = x + self.out(attend(q, k, v, mask))
        gate, up = self.gate_up(rms_norm(x, self.norm2)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Text(nn.Module):
    """A small Llama; the output matrix is not tied to the embeddings."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, vocab_size, bias=False)
        self.layers = nn.ModuleList(TextLayer() for _ in range(TEXT_LAYERS))
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        cos, sin = rope_table(2048)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x [batch, length, 256] embeddings, positions [batch, length], mask [batch, length, length] -> normed states."""
        cos, sin = self.cos[positions][:, None].to(x.dtype), self.sin[positions][:, None].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return rms_norm(x, self.norm)
