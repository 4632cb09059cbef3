"""Generated dialogues, assembled from templates and a small grammar in our own words.

A dialogue has 6 to 40 exchanges of small talk and instructions: lists to keep, plans to change, sums,
rewritten sentences, explanations. Later turns ask back for what was said far above, so that its tokens must
be read exactly.

The same ``random.Random`` state always gives the same text, in every process. Left out: more languages than
English, system prompts, tool calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcal.data.word_problems import DAYS, PEOPLE

# fmt: off
PLACES = ["Lisbon", "Oslo", "Kyoto", "Quito", "Dakar", "Bergen", "Porto", "Riga", "Hanoi", "Galway", "Turin", "Cusco"]
THINGS = ["a lamp", "two notebooks", "olive oil", "a raincoat", "rice", "batteries", "a city map", "green tea", "soap",
          "a tin of paint", "lemons", "a bicycle pump", "wool socks", "candles", "flour", "a birthday card", "garlic",
          "a spare key", "string", "apples"]
HOBBIES = ["gardening", "chess", "swimming", "baking bread", "birdwatching", "the cello", "pottery", "long walks"]
WEATHER = ["a thin rain since the morning", "bright sun and a cold wind", "fog over the river", "the first snow",
           "heat that keeps everybody indoors", "clouds that come and go"]
MOODS = ["rather tired", "quite cheerful", "a bit nervous", "calm", "curious", "in a hurry"]
JOBS = ["a nurse", "a carpenter", "a teacher", "a bus driver", "a translator", "a cook", "a surveyor", "a librarian"]
TOPICS = {
    "how a bicycle stays upright": ["the front wheel turns into a fall", "this brings the wheels back under the rider",
                                    "the faster it rolls, the smaller the turn that is needed"],
    "why bread rises": ["yeast eats sugar in the dough", "it gives off gas that the gluten holds back as bubbles",
                        "the oven sets the walls of the bubbles before the gas escapes"],
    "what a compiler does": ["it reads a program as text and checks its grammar", "it builds a tree of what is meant",
                             "it writes instructions for the machine, and drops those that change nothing"],
    "how tides work": ["the moon pulls the near side of the sea more than the far side", "two bulges of water follow",
                       "the coast turns through both of them in a day"],
    "how to keep a budget": ["write down what comes in and what must go out", "set something aside first",
                             "compare the plan with what was spent at the end of each month"],
    "how to sleep better": ["get up at the same hour every day", "keep the room dark and cool",
                            "leave screens and coffee out of the evening"],
    "how a library sorts its books": ["each subject has a number", "books of one subject stand together by author",
                                      "the catalogue tells the shelf, so that nobody must remember it"],
    "why leaves turn red": ["short days end the making of green pigment", "yellow ones that were there all along show",
                            "red ones are made anew from sugar, which protects the leaf for its last weeks"],
}
SENTENCES = {
    "The meeting that was planned for {day} was moved to {other} because of the trains.":
        "Because of the trains, we moved {day}'s meeting to {other}.",
    "It is the case that {name} does not want to go to {place} at this point in time.":
        "{name} does not want to go to {place} now.",
    "There were many people who were standing in front of the house of {name}.":
        "Many people stood in front of {name}'s house.",
    "In the event that it rains on {day}, the picnic will be held indoors in {place}.":
        "If it rains on {day}, the picnic moves indoors in {place}.",
}
# fmt: on
Turn = tuple[str, str]  # what the user says, and the assistant's answer


@dataclass
class _Talk:
    """The state of a dialogue: who talks, and the facts so far."""

    rng: random.Random
    name: str
    facts: dict[str, str] = field(default_factory=dict)
    shopping: list[str] = field(default_factory=list)

    def one(self, words: list[str]) -> str:
        return self.rng.choice(words)


def dialogue(rng: random.Random) -> list[dict[str, str]]:
    """Messages with role and content, the user's and the assistant's in turn."""
    talk = _Talk(rng, rng.choice(PEOPLE))
    turns = [_hello(talk)]
    turns += [rng.choice(_TURNS)(talk) for _ in range(rng.randint(5, 38))]
    turns.append(_goodbye(talk))
    roles = ("user", "assistant")
    return [{"role": role, "content": said} for turn in turns for role, said in zip(roles, turn, strict=True)]


def _hello(talk: _Talk) -> Turn:
    job, place, mood = talk.one(JOBS), talk.one(PLACES), talk.one(MOODS)
    talk.facts |= {"where I live": place, "what I do for a living": job}
    greeting = talk.one(["Hello!", "Good morning.", "Hi there,", "Good evening."])
    said = f"{greeting} I am {talk.name}, {job} from {place}, and {mood} today."
    offers = ["What can I do for you?", "How can I help?", "What is on your mind?"]
    return said, f"Hello {talk.name}, good to hear from {place}. {talk.one(offers)}"


def _goodbye(talk: _Talk) -> Turn:
    thanks = talk.one(["Thank you, that is all.", "Great, I have to go now.", "That helped a lot, thanks."])
    left = f" Do not forget {talk.shopping[-1]}." if talk.shopping else ""
    return thanks, f"You are welcome, {talk.name}.{left} " + talk.one(["Take care!", "Goodbye!", "See you soon."])


def _weather(talk: _Talk) -> Turn:
    weather, hobby = talk.one(WEATHER), talk.one(HOBBIES)
    talk.facts["what I like to do"] = hobby
    said = f"We have {weather} here. I had hoped for some {hobby}."
    advice = ["Perhaps it clears up by the evening.", "Would tomorrow do as well?", "A short break may still be nice."]
    return said, f"With {weather}, {hobby} can wait a little. {talk.one(advice)}"


def _add(talk: _Talk) -> Turn:
    new = [thing for thing in talk.rng.sample(THINGS, talk.rng.randint(1, 3)) if thing not in talk.shopping]
    if not new:
        return _recall(talk)
    talk.shopping += new
    asked = talk.one(["Please put {} on my list.", "I also need {}.", "Add {} to what I must buy."])
    listed = "".join(f"\n{i}. {thing}" for i, thing in enumerate(talk.shopping, 1))
    return asked.format(" and ".join(new)), f"Done. Your list now has {len(talk.shopping)} entries:{listed}"


def _remove(talk: _Talk) -> Turn:
    if not talk.shopping:
        return _add(talk)
    gone = talk.shopping.pop(talk.rng.randrange(len(talk.shopping)))
    rest = ", ".join(talk.shopping) if talk.shopping else "nothing more"
    return f"I found {gone} at home, so take it off the list.", f"I took off {gone}. What is left: {rest}."


def _appointment(talk: _Talk) -> Turn:
    who, day, hour = talk.one([p for p in PEOPLE if p != talk.name]), talk.one(DAYS), talk.rng.randint(8, 19)
    minute, place = talk.one(["00", "15", "30", "45"]), talk.one(PLACES)
    talk.facts[f"when I meet {who}"] = f"{day} at {hour}:{minute}"
    said = f"I meet {who} on {day} at {hour}:{minute}, before the train to {place}. Can you note that?"
    return said, f"Noted: {who}, {day}, {hour}:{minute}. Leave some time for the train to {place}."


def _recall(talk: _Talk) -> Turn:
    asked, answer = talk.rng.choice(list(talk.facts.items()))
    opening = talk.one(["Do you remember", "Remind me", "By the way, can you tell me"])
    return f"{opening} {asked}?", f"You told me: {answer}."


def _sum(talk: _Talk) -> Turn:
    a, b, c = (talk.rng.randint(3, 98) for _ in range(3))
    said = f"A quick sum, please: {a} boxes with {b} cups each, and {c} cups more. How many cups?"
    return said, f"{a} times {b} is {a * b}, and {a * b} + {c} = {a * b + c}. So there are {a * b + c} cups."


def _explain(talk: _Talk) -> Turn:
    topic, steps = talk.rng.choice(list(TOPICS.items()))
    asked = talk.one(["Explain {} in simple words.", "Can you tell me {}?", "In three points: {}?"])
    listed = "\n".join(f"- {step[0].upper()}{step[1:]}." for step in steps)
    return asked.format(topic), f"Gladly. In short, {topic}:\n{listed}\nShall I go into one of these points?"


def _rewrite(talk: _Talk) -> Turn:
    (long, short), (day, other) = talk.rng.choice(list(SENTENCES.items())), talk.rng.sample(DAYS, 2)
    words = {"day": day, "other": other, "name": talk.one(PEOPLE), "place": talk.one(PLACES)}
    return f'Make this shorter: "{long.format(**words)}"', f'"{short.format(**words)}"'


def _convert(talk: _Talk) -> Turn:
    name, small, factor = talk.rng.choice(
        [("hours", "minutes", 60), ("kilometres", "metres", 1000), ("weeks", "days", 7), ("dozens", "pieces", 12)]
    )
    count = talk.rng.randint(2, 40)
    return f"How many {small} are {count} {name}?", f"{count} {name} are {count * factor} {small}."


_TURNS: list[Callable[[_Talk], Turn]] = [
    _weather, _add, _add, _remove, _appointment, _appointment, _recall, _recall, _sum, _explain, _rewrite, _convert,
]  # fmt: skip
