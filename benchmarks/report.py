"""Write RESULTS.md from results.json."""

from pathlib import Path

from benchmarks.measure import plot_path

FOLDER = Path(__file__).parent
VERSIONS = ("python", "torch", "transformers", "litgpt", "tokenizers")
INTRODUCTION = """# Results

Each figure is a ratio against a peer that took turns with ours in the same run, and the median of
several. More is better: 1.20 means that the peer takes 1.2 times as long, or needs 1.2 times the
memory. `make bench` writes this file. A goal is met where the ratio reaches it; where none was set
for this kind of machine, none is shown.
"""


def write_report(tables: dict) -> None:
    text = [INTRODUCTION]
    for title, modules in tables.items():
        machine: dict[str, str] = {}  # the newest value of each
        for found in sorted(modules.values(), key=lambda found: found["date"]):
            machine |= found["machine"]
        versions = ", ".join(f"{name} {machine[name]}" for name in VERSIONS if name in machine)
        text.append(
            f"\n## {title}\n\n{machine['threads']} threads on {machine['cores']} cores,"
            f" {machine['instructions']}; {versions}."
        )
        limits_of_all = [found["ceilings"] for found in modules.values()]
        best = {name: max(limits[name] for limits in limits_of_all) for name in limits_of_all[0]}
        limits = ", ".join(
            f"{name} {value:.0f} {'GB/s' if 'read' in name else 'GFLOP/s'}"
            for name, value in best.items()
        )
        text.append(f"Ceilings, the best of all runs: {limits}.\n")
        text.append(
            "| what | peer | ratio | goal | ours | peer's | unit | of the limit, notes | date |"
        )
        text.append("|---|---|---|---|---|---|---|---|---|")
        for found in modules.values():
            for row in found["rows"]:
                goal = _goal(row, machine["kind"])
                words = "; ".join(word for word in (row["share"], row["note"]) if word)
                cells = [
                    row["what"],
                    row["peer"],
                    f"**{row['theirs'] / row['ours']:.2f}**",
                    f"{goal:g}" if goal else "",
                ]
                cells += [
                    f"{row['ours']:.3g}",
                    f"{row['theirs']:.3g}",
                    row["unit"],
                    words,
                    found["date"],
                ]
                text.append("| " + " | ".join(cells) + " |")
        plots = [plot_path(name, title).name for name in modules]
        text += [f"\n![{plot}]({plot})" for plot in plots if (FOLDER / plot).exists()]
    (FOLDER / "RESULTS.md").write_text("\n".join(text) + "\n")


def _goal(row: dict, kind: str) -> float | None:
    """The goal of this kind of machine, or the one that is the same for all."""
    amd, intel = row["goals"] or (None, None)
    return {"AVX-512-BF16": amd, "AMX": intel}.get(kind, amd if amd == intel else None)
