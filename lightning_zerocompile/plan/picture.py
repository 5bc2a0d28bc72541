"""A plan as a picture: one bar for each stage, written as SVG, so that it needs no library."""

from __future__ import annotations

from html import escape

from lightning_zerocompile.plan.plan import Plan, in_units

_PARTS = (
    ("masters", "masters", "#4c72b0"),
    ("optimizer states", "states", "#8172b3"),
    ("gathered parameters", "gathered", "#55a868"),
    ("activations", "activations", "#ccb974"),
    ("full gradients", "gradients", "#c44e52"),
    ("reduced gradients", "reduced", "#dd8452"),
)
_WIDTH, _LEFT, _BAR, _STEP = 900, 80, 34, 60  # pixels


def svg(plan: Plan) -> str:
    """Each stage is a bar of its parts, each part as long as its largest size at any time.

    The parts are not all at their largest at one time, so a bar may be longer than the peak of all together, which is a
    black line. A red line is the memory that a rank has.
    """
    totals = [sum(getattr(stage.memory, name) for _, name, _ in _PARTS) for stage in plan.stages]
    limit = plan.machine.memory
    most = max([*totals, *(stage.memory.peak for stage in plan.stages), limit or 0, 1])
    scale = (_WIDTH - _LEFT - 20) / most
    bottom = 50 + _STEP * len(plan.stages)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 50}" font-family="sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="24" font-size="15">{escape(plan.module)}, {plan.world_size} ranks: bytes on one rank</text>',
    ]
    for number, stage in enumerate(plan.stages):
        top, x = 44 + number * _STEP, float(_LEFT)
        lines.append(f'<text x="10" y="{top + 22}">stage {stage.stage}</text>')
        for label, name, color in _PARTS:
            size = getattr(stage.memory, name)
            lines.append(
                f'<rect x="{x:.1f}" y="{top}" width="{size * scale:.1f}" height="{_BAR}" fill="{color}">'
                f"<title>{label}: {in_units(size)}</title></rect>"
            )
            x += size * scale
        peak = _LEFT + stage.memory.peak * scale
        lines.append(f'<path d="M{peak:.1f} {top - 4}v{_BAR + 8}" stroke="black" stroke-width="2"/>')
        anchor = "end" if peak > _WIDTH - 150 else "start"
        shift = -4 if anchor == "end" else 4
        text = f"peak {in_units(stage.memory.peak)}"
        lines.append(f'<text x="{peak + shift:.1f}" y="{top + _BAR + 16}" text-anchor="{anchor}">{text}</text>')
    if limit is not None:
        x = _LEFT + limit * scale
        lines.append(f'<path d="M{x:.1f} 34V{bottom}" stroke="red" stroke-width="2" stroke-dasharray="6 4"/>')
    for number, (label, _, color) in enumerate(_PARTS):
        x = 10 + number * 148
        lines.append(f'<rect x="{x}" y="{bottom + 16}" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 17}" y="{bottom + 27}">{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
