"""The stories that the bundled model was trained on, as a grammar of a few hundred words.

A story is a beginning, two or three events and an end. The beginning picks a cast (a name, a
kind of creature, a trait, a place, a thing); the rest refers to the same cast. So when one
request leaks into another, a wrong name or thing shows up in the text.

Always holds: story(Random(s)) begins with opening(Random(s)), and every word of every story
is in WORDS.

Standard library only, so that checking a text needs neither a model nor torch.
"""

from __future__ import annotations

import random
import re


def _list(words: str) -> tuple[str, ...]:
    return tuple(words.split())


# Within a list all words start with different letters: the first byte decides the word. A
# byte-level model with a million parameters learns to keep a name only if it is that easy.
NAMES = {
    "she": _list("Ada Clara Ella Ivy Mia Sofia"),
    "he": _list("Ben Finn Hugo Leo Ned Tom"),
    "it": _list("Quill Zuzu"),
}
PRONOUNS = {  # subject, object, possessive
    "she": ("she", "her", "her"),
    "he": ("he", "him", "his"),
    "it": ("it", "it", "its"),
}
CREATURES = _list("""
    badger cat dragon fox giant hedgehog knight mouse otter painter rabbit sailor
""")
KINDS = {"she": CREATURES, "he": CREATURES, "it": _list("cloud ghost robot teapot")}
TRAITS = _list("brave clever gentle hungry kind lazy merry proud quiet shy")
COLORS = _list("blue golden magic old purple red silver tiny yellow")
THINGS = _list("""
    basket clock drum feather hat kite lantern map necklace quilt ring scarf umbrella violin
""")
PLACES = {  # as the beginning says it: as the rest of the story says it
    "at the edge of the wood": "wood",
    "behind the bakery": "bakery",
    "beside a mill": "mill",
    "by the river": "river",
    "in a crooked tower": "tower",
    "in a green garden": "garden",
    "in a snowy village": "village",
    "in a white lighthouse": "lighthouse",
    "near the harbor": "harbor",
    "on a tiny island": "island",
}

# In a template {she}, {him} and {her} stand for the hero's subject, object and possessive
# pronoun, {pal} and {palkind} for the friend, {hero} is "a shy fox" and {prize} "a red kite".
HAVING = (
    "Once upon a time there was {hero} named {name}. {She} lived {where} and had {prize}.",
    "Long ago, {where}, there lived {hero} named {name}. {Her} only treasure was {prize}.",
    "{name} was {hero} who lived {where}. {She} loved {her} {color} {thing}.",
    "One day {hero} named {name} found {prize} {where}.",
    "There once was {hero} {where}. {Her} name was {name}, and {she} had {prize}.",
    "This is the story of {name}, {hero} from the {place}, and {her} {color} {thing}.",
)
WANTING = (
    "Once upon a time there was {hero} named {name}. {She} lived {where} and wanted {prize}.",
    "Long ago, {where}, there lived {hero} named {name}, who dreamed of {prize}.",
    "{name} was {hero} who lived {where}. All {she} wished for was {prize}.",
    "Every night {name}, {hero} from the {place}, wished on a star for {prize}.",
)

# A scene is two or three events that belong together. Scenes differ in length, so that the
# lengths of stories vary.
LOSING = (
    (
        "One morning the wind blew the {thing} away.",
        "{pal} the {palkind} saw it dance over the roofs and ran after it.",
        "There it was, in a tree, and {pal} climbed up to get it.",
    ),
    (
        "But a magpie stole the {thing} and flew off.",
        "{name} asked {a_palkind} named {pal} for help.",
        "They sang so sweetly that the magpie gave it back.",
    ),
    (
        "Then the {thing} fell into a deep well.",
        "{pal} the {palkind} pulled it out.",
    ),
    (
        "One night the {thing} was gone.",
        "{name} and {pal} the {palkind} looked under every bed and every stone.",
        'At last {pal} laughed. "{name}, it is on your head!"',
    ),
    (
        "Soon {she} forgot the {thing} in the rain.",
        "{pal}, {a_palkind}, kept it dry.",
    ),
)
SHARING = (
    (
        "One cold night {pal} the {palkind} knocked at the door.",
        "{name} made soup and let {pal} hold the {thing}.",
        "In the morning {pal} baked a plum cake.",
    ),
    (
        "{She} met {pal}, {a_palkind} who was afraid of the dark.",
        '"Take my {thing}," said {name}, "and I will walk with you."',
    ),
    (
        "Then {she} saw {a_palkind} crying. It was {pal}, who had nobody to play with.",
        "So they played with the {thing} until the moon came up.",
    ),
    (
        '"What a fine {thing}!" said {pal} the {palkind}.',
        "So {name} made another one, just for {pal}.",
    ),
)
JOURNEY = (
    (
        "{She} packed the {thing} and set off to see the sea.",
        'On the road {she} met {pal}, {a_palkind}. "May I come too?" asked {pal}.',
        "It was bigger than the sky.",
    ),
    (
        "One evening {name} took the {thing} and climbed a mountain.",
        "At the top sat {pal}, {a_palkind}, drinking tea with the moon.",
        "{pal} gave {him} a cup, and they counted the stars.",
    ),
    (
        "The queen asked to see the {thing}.",
        "{pal} the {palkind} carried {him} to her castle in a little boat.",
    ),
)
EARNING = (
    (
        "{She} met {pal}, {a_palkind}, who had just such a thing.",
        '"You may have it for a song," said {pal}.',
        "So {name} sang until the birds joined in.",
    ),
    (
        '"I can make you one," said {pal} the {palkind}, "if you bake me a pie."',
        "{name} baked all day, and {pal} ate every crumb.",
    ),
    (
        "No shop had one.",
        "But {pal} the {palkind} opened an old box, and in it was the {thing}.",
    ),
    (
        "{She} worked all summer and saved every penny.",
        "Then {pal} the {palkind} was ill, and {name} spent it all on honey.",
        "The next day the {thing} lay at the door.",
    ),
)
ENDINGS = (
    "After that, {name} and {pal} were the best of friends.",
    "That night {name} slept well, with the {color} {thing} by {her} side.",
    "Not bad for {hero}!",
    "Everyone near the {place} said that no {kind} was ever so {trait}.",
    "{name} and {pal} danced all the way home to the {place}.",
    "If you go to the {place}, you can still see {name} and the {thing}.",
    '"Thank you, {pal}," said {name}, and {she} never lost the {thing} again.',
    "{pal} still tells of the {trait} {kind} and the {color} {thing}.",
    "And {name} was happy.",
)
PLOTS = ((HAVING, LOSING), (HAVING, SHARING), (HAVING, JOURNEY), (WANTING, EARNING))

PUNCTUATION = '.,!?"'


def words_of(text: str) -> list[str]:
    """The words of a text in order, lower-cased and without punctuation at either end."""
    stripped = (piece.strip(PUNCTUATION) for piece in text.lower().split())
    return [word for word in stripped if word]


def story(rng: random.Random) -> str:
    """Tell a story: ASCII, one paragraph, 120 to 350 bytes."""
    beginning, scene, cast = _plan(rng)
    return " ".join(part.format(**cast) for part in (beginning, *scene, rng.choice(ENDINGS)))


def opening(rng: random.Random) -> str:
    """The beginning of the story that story() would tell with this rng; used as a prompt."""
    beginning, _, cast = _plan(rng)
    return beginning.format(**cast)


def _plan(rng: random.Random) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Draw a beginning, a scene that goes with it, and a cast."""
    beginnings, scenes = rng.choice(PLOTS)
    return rng.choice(beginnings), rng.choice(scenes), _cast(rng)


def _cast(rng: random.Random) -> dict[str, str]:
    """Draw a value for every field of the templates."""
    sex_of = {name: sex for sex, names in NAMES.items() for name in names}
    name, pal = rng.sample(sorted(sex_of), 2)
    she, him, her = PRONOUNS[sex_of[name]]
    # With two of a kind, "the fox" would be ambiguous.
    kind = rng.choice(KINDS[sex_of[name]])
    palkind = rng.choice([k for k in KINDS[sex_of[pal]] if k != kind])
    trait, color, thing = rng.choice(TRAITS), rng.choice(COLORS), rng.choice(THINGS)
    where, place = rng.choice(sorted(PLACES.items()))
    return {
        "name": name,
        "she": she,
        "him": him,
        "her": her,
        "She": she.title(),
        "Her": her.title(),
        "kind": kind,
        "trait": trait,
        "hero": _a(f"{trait} {kind}"),
        "pal": pal,
        "palkind": palkind,
        "a_palkind": _a(palkind),
        "color": color,
        "thing": thing,
        "prize": _a(f"{color} {thing}"),
        "where": where,
        "place": place,
    }


def _a(phrase: str) -> str:
    """The phrase with its indefinite article; a vowel rule is enough for this grammar."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def _every_word() -> frozenset[str]:
    """Every word that a story can contain, from the tables above."""
    texts = [*ENDINGS, *PLACES, *PLACES.values(), *TRAITS, *COLORS, *THINGS, "a an"]
    for table in (NAMES, PRONOUNS, KINDS):
        texts += [word for words in table.values() for word in words]
    for beginnings, scenes in PLOTS:
        texts += [*beginnings, *(event for scene in scenes for event in scene)]
    return frozenset(words_of(re.sub(r"\{\w+\}", "", " ".join(texts))))


WORDS = _every_word()
