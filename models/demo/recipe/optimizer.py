"""Muon for the matrices inside the blocks, AdamW for the rest, and one learning-rate schedule for both."""
import torch
from torch import nn


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al., 2024)."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"].mul_(group["momentum"]).add_(p.grad)
                update = p.grad.add(m, alpha=group["momentum"])
                # stacked matrices (q, k, v or gate, up) are orthogonalised one by one
                size = 256 if p.shape[0] == 768 else 1024 if p.shape[0] == 2048 else p.shape[0]
                o = torch.cat([orthogonal(x) for x in update.split(size)])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(o, alpha=-group["lr"] * max(1.0, size / p.shape[1]) ** 0.5)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with equal singular values, by five Newton-Schulz steps; x [rows, columns]."""
    y = x.bfloat16()
    tall = y.shape[0] > y.shape[1]
    y = y.t() if tall else y
    y = y / (y.norm() + 1e-7)
    for _ in range(5):
        a = y @ y.t()
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
    return (y.t() if tall else y).float()


class Optimizers:
    """Both optimizers, stepped together; `groups` are (module, Muon rate, AdamW rate)."""

    def __init__(self, groups: list[tuple[nn.Module, float, float]]) -> None:
        self.all: list[torch.optim.Optimizer] = []
        for module, muon_rate, adam_rate in groups:
            matrices = [p for n, p in module.named_parameters() if p.ndim == 2 and ("blocks." in n or "layers." in n)]
            chosen = {id(p) for p in matrices}
            rest = [p for p in module.parameters() if id(p) not in chosen]
            if matrices:
                self.all.append(Muon(matrices, muon_rate))
            self.all.append(torch.optim.AdamW(rest, adam_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True))
        self.rates = [g["lr"] for o in self.all for g in o.param_groups]
        self.rest = [p for o in self.all if not isinstance(o, Muon) for g in o.param_groups for p in g["params"]]

    def step(self, scale: float) -> None:
        """Clip, step with all rates times `scale`, and clear the gradients."""
        nn.utils.clip_grad_norm_([p for p in self.rest if p.grad is not None], 2.0)
        rates = iter(self.rates)
        for o in self.all:
            for g in o.param_groups:
                g["lr"] = next(rates) * scale
            o.step()
            o.zero_grad(set_to_none=True)

    def state(self) -> list[dict]:
        """What a checkpoint needs to go on."""
        return [o.state_dict() for o in self.all]

    def load(self, states: list[dict]) -> None:
        """The inverse of `state`."""
        for o, s in zip(self.all, states, strict=True):
            o.load_state_dict(s)


def schedule(step: int, total: int, warm: int = 50, flat: float = 0.4, floor: float = 0.02) -> float:
    """Rise, stay, then fall linearly to `floor`; `step` counts from 0."""
    progress = step / total
    fall = 1.0 if progress < flat else max(floor, (1 - progress) / (1 - flat))
    return min(1.0, (step + 1) / warm) * fall
