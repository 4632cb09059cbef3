"""Word problems, generated: stories with numbers, and solutions that restate them. They fill contexts in
which something else is looked up (kvcal.data.reading).

The same ``random.Random`` state always gives the same problem, in every process.
"""

from __future__ import annotations

import random

# fmt: off
PEOPLE = ["Amara", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kavya", "Lucia",
          "Mateo", "Nadia", "Omar", "Priya", "Rosa", "Stefan", "Tomas", "Yuki"]
# fmt: on
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def word_problem(rng: random.Random) -> str:
    """A story of 3 to 9 events with numbers, a question, and a solution that restates each with its
    arithmetic."""
    who, thing = rng.choice(PEOPLE), rng.choice(["rolls", "stamps", "seedlings", "tiles", "tickets", "eggs", "bricks"])
    count = rng.randint(20, 400)
    story, steps = [f"{who} starts the week with {count} {thing}."], []
    for _ in range(rng.randint(3, 9)):
        said, step, count = _event(rng, who, thing, count)
        story.append(said)
        steps.append(step)
    price = rng.randint(2, 19)
    if rng.random() < 0.5:
        story.append(f"At the end {who} sells all of them at {price} coins each. How many coins is that?")
        steps.append(f"{count} {thing} at {price} coins are {count} * {price} = {count * price} coins.")
        count *= price
    else:
        story.append(f"How many {thing} does {who} have in the end?")
    solution = "\n".join(f"Step {i}: {step}" for i, step in enumerate(steps, 1))
    return f"Problem. {' '.join(story)}\nSolution.\n{solution}\nAnswer: {count}\n"


def _event(rng: random.Random, who: str, thing: str, count: int) -> tuple[str, str, int]:
    """One event: its sentence, its step of the solution, and the new count."""
    day, friend, n = rng.choice(DAYS), rng.choice([name for name in PEOPLE if name != who]), rng.randint(2, 60)
    divisors = [d for d in range(2, 10) if count % d == 0 and count > 20 * d]
    kind = rng.choice(["gain", "boxes", "loss", "percent", "share"])
    if kind == "share" and divisors:
        d = rng.choice(divisors)
        said = f"On {day} {who} and {d - 1} others share everything equally."
        return said, f"One share is {count} / {d} = {count // d} {thing}.", count // d
    if kind == "percent" and count % 20 == 0 and count > 20:
        p = rng.choice([5, 10, 20, 25])
        lost = count * p // 100
        said = f"On {day} {p} percent of the {thing} turn out to be spoilt."
        return said, f"{p} percent of {count} are {lost}, and {count} - {lost} = {count - lost}.", count - lost
    if kind == "loss" and count > n:
        return f"On {day} {friend} takes {n} of them.", f"{count} - {n} = {count - n} {thing}.", count - n
    if kind == "boxes":
        m = rng.randint(2, 12)
        said = f"On {day} {friend} brings {n} boxes with {m} {thing} each."
        return said, f"{n} * {m} = {n * m}, and {count} + {n * m} = {count + n * m} {thing}.", count + n * m
    return f"On {day} {who} finds {n} more.", f"{count} + {n} = {count + n} {thing}.", count + n
