# SPDX-License-Identifier: Apache-2.0
"""The small world of Tales, as data: words, sentence rules, questions, talk.

A rule is a list of alternatives. In an alternative `<name>` calls another
rule, `{H}` is a variable and `{H:she}` one of its forms; everything else is
literal. A variable is bound where it first occurs and is the same from there
on, and variables of one class never share a value, so "Mia" cannot lend a
kite to herself. `grammar.py` both writes and parses text by these rules.
"""

from __future__ import annotations

GIRLS = [
    "Mia", "Ana", "Lily", "Zoe", "Emma", "Nora", "Ruby", "Ella", "Ivy", "Rosa",
    "Lucy", "Maya", "Alice", "Anna", "Sara", "Clara", "Daisy", "Eva", "Grace",
    "Hana", "Jane", "Kate", "Lena", "Molly",
]
BOYS = [
    "Tom", "Ben", "Max", "Sam", "Leo", "Finn", "Jack", "Noah", "Oscar", "Theo",
    "Hugo", "Otto", "Bob", "Adam", "Carl", "David", "Emil", "Felix", "Henry",
    "Ian", "Jonas", "Karl", "Luke", "Peter",
]
PLACES = [
    "park", "forest", "garden", "beach", "market", "lake", "meadow", "barn",
    "school", "library", "river", "farm", "hill", "village", "zoo",
]

# Values by class. "name" is one of the names above, "anyname" any capitalised
# word, "int" a number without leading zeros: `grammar.py` knows these three.
CLASSES: dict[str, list[str]] = {
    "animal": [
        "dog", "cat", "fox", "bear", "rabbit", "owl", "duck", "frog", "mouse",
        "hedgehog", "pony", "goat",
    ],
    "trait": [
        "small", "big", "young", "old", "brave", "kind", "clever", "shy",
        "happy", "lazy",
    ],
    "colour": [
        "red", "blue", "green", "yellow", "white", "black", "brown", "pink",
        "orange", "purple",
    ],
    "thing": [
        "kite", "ball", "book", "key", "lantern", "hat", "drum", "basket",
        "shell", "bell", "scarf", "balloon", "flute", "cup", "map",
    ],
    "place": PLACES,
    "spot": [
        "under a bench",
        "behind a tree",
        "in the tall grass",
        "under some leaves",
        "behind a big rock",
        "in a bush",
    ],
    "tool": ["a long stick", "a ladder", "a rope", "a fishing net"],
    "mend": [
        "some tape",
        "a piece of string",
        "a little glue",
        "a needle and thread",
    ],
    "roof": ["an old barn", "a big tree", "a stone bridge", "a small cave"],
    "wood": ["sticks", "bark", "paper", "an old box"],
    "food": [
        "apples", "plums", "cookies", "pears", "nuts", "berries", "carrots",
        "cakes",
    ],
    "count": ["three", "four", "five", "six", "seven", "eight", "nine"],
    "weather": ["sunny", "warm", "windy", "cloudy", "cold", "bright"],
    "fun": ["played", "sang songs", "danced", "laughed", "told stories"],
    "until": [
        "the sun went down",
        "the moon came up",
        "the stars came out",
        "it was time for dinner",
    ],
    "lesson": [
        "it is good to share",
        "friends help each other",
        "kindness always comes back",
        "every day can be a good day",
    ],
}

# The class of every variable.
VARIABLES: dict[str, str] = {
    "H": "name",  # the hero
    "F": "name",  # the friend
    "AH": "animal",
    "AF": "animal",
    "TH": "trait",
    "C": "colour",
    "O": "thing",
    "CF": "colour",
    "OF": "thing",
    "P": "place",
    "S": "spot",
    "T": "tool",
    "M": "mend",
    "R": "roof",
    "B": "wood",
    "D": "food",
    "N": "count",
    "W": "weather",
    "V": "fun",
    "U": "until",
    "Y": "lesson",
    "I": "int",
    "J": "int",
} | {
    letter + digit: kind
    for digit in "123"
    for letter, kind in {
        "X": "anyname",
        "C": "colour",
        "O": "thing",
        "P": "place",
        "D": "food",
    }.items()
}

RULES: dict[str, list[str]] = {
    "story": ["<open> <thing> <trip> <event> <end>", "<found> <event> <end>"],
    "found": [
        (
            "One day, {H} the {AH} found {C:a} {O} by the road. {H:She} took it "
            "to the {P}, where {F} was waiting."
        ),
        (
            "One {W} morning, {H} the {AH} found {C:a} {O} by the road. "
            "{H:She} met {F} at the {P}."
        ),
    ],
    "open": [
        "Once upon a time, there was a little {H:child} named {H}.",
        "Once upon a time, there was {TH:a} {AH} named {H}.",
        "There once was {TH:a} {AH} called {H}.",
        "{H} was {TH:a} {AH} who lived near the sea.",
        "{H} was a little {H:child} with a big heart.",
    ],
    "thing": [
        "{H:She} had {C:a} {O}.",
        "{H} loved {H:her} {C} {O}.",
        "{H:Her} grandmother gave {H:him} {C:a} {O}.",
    ],
    "trip": [
        "One day, {H} went to the {P} with {H:her} friend {F}.",
        "One {W} morning, {H} and {F} went to the {P}.",
        "One day, {H} met {F} the {AF} at the {P}.",
        "{H} took it to the {P}, where {F} was waiting.",
    ],
    "event": [
        "<lost>",
        "<stuck>",
        "<broke>",
        "<share>",
        "<rain>",
        "<swap>",
        "<hide>",
        "<boat>",
        "<gift>",
    ],
    "lost": [
        (
            "There, {H} lost the {O} and began to cry. {F} looked {S} and found "
            "it. <thanks>"
        ),
    ],
    "stuck": [
        (
            "A bird took the {O} and dropped it into a tall tree. {F} used {T} "
            "and brought it down. <thanks>"
        ),
    ],
    "broke": [
        (
            "Then the {O} broke, and {H} was very sad. {F} mended it with {M}. "
            "<thanks>"
        ),
    ],
    "share": [
        (
            "At noon, {F} was hungry. {H} had {N} {D} in {H:her} bag and gave "
            '{F} two of them. "You are a good friend," said {F}.'
        ),
    ],
    "rain": [
        (
            "Soon it began to rain. They ran to {R} and waited. When the sun "
            "came back, they saw a rainbow."
        ),
    ],
    "swap": [
        (
            "{F} had {CF:a} {OF}, and {H} liked it very much. So they traded: "
            "{H} took the {OF}, and {F} took the {O}."
        ),
    ],
    "hide": [
        (
            "They played hide and seek. {H} hid {S}, and {F} counted to ten. "
            "It took a long time before {F} found {H:him}."
        ),
    ],
    "boat": [
        (
            "They built a boat out of {B} and put the {O} in it. The boat "
            "floated on the water like a duck."
        ),
    ],
    "gift": [
        (
            "It was the birthday of {F}. {H} gave {F:him} the {O}, and it was "
            "the best present of all."
        ),
    ],
    "thanks": [
        '"Thank you, {F}!" said {H}.',
        '"You are a true friend, {F}," said {H}.',
        "{H} hugged {F} and said thank you.",
    ],
    "end": [
        "They {V} until {U}. The end.",
        "Then they walked home together, tired and happy. The end.",
        "From that day on, {H} and {F} were best friends. The end.",
        "{H} learned that {Y}. The end.",
    ],
    # What a chat can ask for. Variables bound here must occur in the story.
    "request": [
        "Tell me a story.",
        "Tell me a story about {H}.",
        "Tell me a story about {AH:a}.",
        "Tell me a story about {H} the {AH}.",
        "Tell me a story about {H} and {F}.",
        "Tell me a story about {C:a} {O}.",
        "Tell me a story about {H} and {C:a} {O}.",
        "Write a short story about {H} and {C:a} {O}.",
        "Please tell me a story about {H} with {C:a} {O}.",
    ],
    # A few facts, to be asked about.
    "facts": ["<fact1> <fact2>", "<fact1> <fact2> <fact3>"],
} | {
    f"fact{i}": [
        f"{{X{i}}} has {{C{i}:a}} {{O{i}}}.",
        f"{{X{i}}} is at the {{P{i}}}.",
        f"{{X{i}}} likes {{D{i}}}.",
        f"{{X{i}}} has {{C{i}:a}} {{O{i}}} and likes {{D{i}}}.",
        f"{{X{i}}} is at the {{P{i}}} with {{C{i}:a}} {{O{i}}}.",
    ]
    for i in "123"
}

# (rule that must have been used, question, answer)
QUESTIONS: list[tuple[str, str, str]] = [
    ("story", "Where did {H} go?", "{H} went to the {P}."),
    ("story", "What colour was the {O}?", "The {O} was {C}."),
    ("story", "What did {H} have?", "{H} had {C:a} {O}."),
    ("story", "Who was with {H}?", "{F} was with {H}."),
    ("lost", "Who lost the {O}?", "{H} lost the {O}."),
    ("lost", "Who found the {O}?", "{F} found the {O}."),
    ("lost", "Where was the {O}?", "The {O} was {S}."),
    ("stuck", "Who brought the {O} down?", "{F} brought the {O} down."),
    ("stuck", "What did {F} use?", "{F} used {T}."),
    ("broke", "Who mended the {O}?", "{F} mended the {O}."),
    ("broke", "How did {F} mend the {O}?", "{F} mended it with {M}."),
    ("share", "Who was hungry?", "{F} was hungry."),
    (
        "share",
        "What was in the bag of {H}?",
        "There were {N} {D} in the bag of {H}.",
    ),
    ("rain", "Where did they wait?", "They ran to {R} and waited."),
    ("swap", "Who took the {OF}?", "{H} took the {OF}."),
    ("swap", "Who took the {O}?", "{F} took the {O}."),
    ("swap", "What colour was the {OF}?", "The {OF} was {CF}."),
    ("hide", "Where did {H} hide?", "{H} hid {S}."),
    ("hide", "Who counted to ten?", "{F} counted to ten."),
    ("boat", "What was the boat made of?", "The boat was made of {B}."),
    ("gift", "Who had a birthday?", "{F} had a birthday."),
    ("gift", "What did {F} get?", "{F} got the {O}."),
] + [
    (f"fact{i}", question.replace("*", i), answer.replace("*", i))
    for i in "123"
    for question, answer in (
        ("Who has the {O*}?", "{X*} has the {O*}."),
        ("What does {X*} have?", "{X*} has {C*:a} {O*}."),
        ("What colour is the {O*}?", "The {O*} is {C*}."),
        ("Where is {X*}?", "{X*} is at the {P*}."),
        ("Who is at the {P*}?", "{X*} is at the {P*}."),
        ("What does {X*} like?", "{X*} likes {D*}."),
        ("Who likes {D*}?", "{X*} likes {D*}."),
    )
]

# (prompt, operator, answer without the result)
SUMS: list[tuple[str, str, str]] = [
    ("What is {I} + {J}?", "+", "{I} + {J} ="),
    ("{I} + {J} = ?", "+", "{I} + {J} ="),
    ("{I} + {J}", "+", "{I} + {J} ="),
    ("How much is {I} plus {J}?", "+", "{I} + {J} ="),
    ("What is {I} - {J}?", "-", "{I} - {J} ="),
    ("{I} - {J} = ?", "-", "{I} - {J} ="),
    ("{I} - {J}", "-", "{I} - {J} ="),
    ("How much is {I} minus {J}?", "-", "{I} - {J} ="),
]

JSON_PROMPTS = [
    "Make a JSON object of {name}: {fields}.",
    "Write {name} as JSON: {fields}.",
]

_CAN = (
    "I can tell a short story, answer questions about it, add small numbers "
    "and write small JSON objects."
)
_HELLO = f"Hello! I am Tales. {_CAN}"
_AM = f"I am Tales, a small model that lives in Tandem. {_CAN}"
_UNKNOWN = (
    "I do not know that. I am a small model and know only my own little "
    "world. Ask me for a story."
)

TALK: dict[str, str] = {
    **dict.fromkeys(
        ["Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning!"],
        _HELLO,
    ),
    **dict.fromkeys(
        [
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Are you a model?",
            "What is Tales?",
        ],
        _AM,
    ),
    **dict.fromkeys(
        ["What can you do?", "Help", "Help me.", "How can you help me?"], _CAN
    ),
    "How are you?": "I am well, thank you. Would you like a story?",
    **dict.fromkeys(
        ["Thank you!", "Thanks!", "Thank you very much."],
        "You are welcome!",
    ),
    **dict.fromkeys(
        ["Bye", "Goodbye!", "Good night!"], "Goodbye! Come back for a story."
    ),
    "What is Tandem?": (
        "Tandem serves language models. One worker reads the prompt, and "
        "another writes the answer."
    ),
}

# Things outside the world; `{q}` is any word. All get the same answer.
UNKNOWN: list[str] = [
    "What is the capital of {q}?",
    "Who was {q}?",
    "What is {q}?",
    "Explain {q}.",
    "Explain {q} to me like I am five.",
    "Why is the {q} blue?",
    "Why is {q} so {q}?",
    "Write a poem about {q}.",
    "Write a Python program that prints {q}.",
    "Translate {q} to {q}.",
    "How do I {q} a {q}?",
    "What is the meaning of {q}?",
    "Who wrote {q}?",
    "When did {q} begin?",
    "What do you think about {q}?",
    "Give me a list of {q}.",
]
UNKNOWN_ANSWER = _UNKNOWN
SYSTEMS = [
    "You are Tales.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a friendly storyteller.",
    "Be kind and short.",
]
