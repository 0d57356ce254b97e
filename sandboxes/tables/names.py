"""Names for generated tables. Training and held-out tables draw from disjoint word pools. A hash of each word determines its pool.

A word is an English word from `ENGLISH`, a blend of two English words, or an invented word. `belongs` assigns each word to exactly one of
the two splits. Every name contains such a word, so no name of a file, column or value appears in both splits. Both splits use the same
units, joining words, bare numbers and common words (`date`, `name`, ...), which are never a full name. Blends are necessary because a
policy that has seen only words that it can complete from memory completes words instead of copying them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random

from agentrl.records import Split


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ENGLISH = _words(
    """
    acorn actor agent alarm album amber anchor angle anvil apple apron arch arrow artist atlas attic autumn award badge bakery
    balance ballot bamboo banner barrel basin basket batch battery beacon beaver bench berry bicycle birch blanket blossom board
    bonus border bottle boulder branch brass bread breeze brick bridge bronze brush bucket budget buffer bundle button cabin cable
    cactus camera canal candle canoe canvas canyon carbon cargo carpet carton castle cattle cedar cellar chain chair chamber
    channel charge cherry circle citrus claim clay cliff climate clinic clock cloud clover coach coast cobalt coffee comet
    copper coral corner cotton counter course crane crater credit crystal curve cycle dairy debit degree delay delivery demand
    density depth desert device diary dinner discount distance dock donkey draft dragon drawer dress driver drum dune duty eagle
    earning echo edge effort elbow ember engine entry envelope error escape estate event exit expense fabric factory falcon farm
    feather fee fence ferry fever fiber field figure filter finger flame flight floor flour flow flower forest fork fossil frame
    freight frost fruit fuel funnel galaxy garage garden gate gauge ginger glacier glass glove grade grain granite grape gravel
    grid ground growth guard guest guitar habit hammer harbor harvest hazel heat height helmet herb hill hinge honey horizon hotel
    hour humidity hunter ice idea impact income index ink invoice iron item ivory jacket jar jasmine jewel joint journey juice
    jungle kettle kitchen knee knot ladder lagoon lamp lantern lawn layer lead leaf lemon lens lesson letter level lever
    light lily limit linen load lobby locker lodge lunch machine magnet mango maple marble margin market mask meadow melon member
    metal meter mill mirror model moment monitor moss motor mountain needle nest network night noise north note novel oak
    oat object office olive onion opera orange orbit orchard order origin otter outlet output oven owner oyster package paddle
    paint palace panel paper parcel park passage pasta patch path payment peach pearl pebble pencil pepper permit phase phone
    piano picnic pigeon pillow pilot pine pipe plane planet plant plaster plate plaza plum pocket point polar pond portion post
    potato powder power prairie premium pressure price prism prize product profit pulley pump purse quarry quarter queue rabbit
    rack radio rail rain ranch rate ratio raven rebate reef region relay rent repair report reserve result return
    ribbon rice ridge ring river road robot rocket roof room root rope route rubber saddle sail salad sales salmon salt sample
    sand satin sauce scale scarf school score screen seal season seat seed segment sensor series service shade shaft shelf shell
    shift ship shirt shop shore shovel signal silver size skill slope smoke snow soap socket soil solar sound south spark speed
    spice spring square stable staff stage stamp station steam steel stem step stock stone storage storm stove strain strap straw
    stream street stripe studio sugar summer summit supply surface swan switch table talent tank target tariff tax team temple
    tension tent terrain theme thread ticket tide tile timber tin toast token tool torch tower track trade trail train travel tray
    trench trend trial tribe truck trunk tulip tunnel turbine turtle twig unit usage valley valve vapor vault vector vendor
    vessel village vine violet visit visitor voice volcano voltage volume voyage wage wagon walnut warmth water wave wax wedge week
    weight whale wheat wheel width willow window wing winter wire wolf wood wool worker yard yarn yield zebra zinc zone
    """
)
UNITS = _words("cm mm km kg g t l ml m2 % EUR USD GBP JPY kWh W C K h min s ppm Hz bar")
COMMON = _words(
    """
    answer argument average code column common count date day dict different distinct earliest file first float from high highest
    import int join json key label latest len line list lines longest low max mean min name number often open parse print
    python range read reader record round row second set share sheet sort split sub submit sum text time total type unique value
    """
)
JOINERS = _words("of per in and the by to for")
ONSETS = (
    "",
    *_words("b b bl br c c ch cl cr d d dr f f fl fr g g gl gr h h j k k l l m m n n p p pl pr qu"),
    *_words("r r s s sc sh sl sp st str t t th tr v w x y z"),
)
VOWELS = _words("a e i o u a e i o u ai au ea ee ia ie io oa oo ou y")
CODAS = ("", "", "", "", *_words("c d g l l ll m n n nd ng nt p r r rd s s ss st t th x"))
ACCENTED = _words("é è ç ã å ö ü ñ í ó ô ā")


def belongs(word: str) -> Split:
    """Returns the split to which a word belongs, ignoring case. One word in four is held out."""
    return Split.HELDOUT if zlib.crc32(word.lower().encode()) % 4 == 0 else Split.TRAIN


class Names:
    """Random names for one table, from words that belong to `split`. `column`, `stem`, `sibling` and `value` never return a name twice.

    Plain names have one or two words, as in most tables. Wild names are longer, more often invented, and in every style. The base policy's
    demonstrations use wild names, so that the policy learns to copy any text.
    """

    def __init__(self, rng: Random, split: Split, *, wild: bool) -> None:
        self.rng = rng
        self.split = split
        self.wild = wild
        self.given: set[str] = set()

    def word(self) -> str:
        """Returns a lower-case word of the split: an English word, a blend of two (`harbet`, `lanight`) or an invented word."""
        shares = (0.25, 0.4, 0.35) if self.wild else (0.65, 0.25, 0.1)
        while True:
            word = self.rng.choices((self._english, self._blend, self._coined), shares)[0]()
            if belongs(word) is self.split:
                return word

    def column(self) -> str:
        """Returns a column name in a common style: `net_load_kg`, `Net Load`, `netLoad`, `net load (kg)`, `load/area`, `x_12`."""
        return self._new(self._column)

    def stem(self) -> str:
        """Returns a file name without extension, such as `harbor_visits-2` or `KelmorLog`."""
        return self._new(self._stem)

    def sibling(self, name: str) -> str:
        """Returns a name that shares its start or end with `name`: `mean area` for `mean radius`, `visits_harbor` for `visits`."""

        def make() -> str:
            mark = next((m for m in "_ -/." if m in name), "_")
            head, _, tail = name.partition(mark)
            return self.rng.choice((f"{name}{mark}{self.word()}", f"{head}{mark}{self.word()}", f"{self.word()}{mark}{tail or head}"))

        return self._new(make)

    def value(self) -> str:
        """Returns a cell for a category: `Tulip`, `kelm`, `North Drum`, `QX-17`, `class_3`."""
        return self._new(self._value)

    def phrases(self, count: int) -> list[str]:
        """Returns `count` distinct phrases of one to five words from a small vocabulary, so that words recur."""
        vocabulary = [self._cased(self.word()) for _ in range(max(4, count // 3))]
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            words = [self.rng.choice(vocabulary) for _ in range(self.rng.choice((1, 2, 2, 3, 3, 4, 5) if self.wild else (1, 2, 2, 3)))]
            if len(words) > 2 and self.rng.random() < 0.3:
                words[1] = self.rng.choice(JOINERS)
            chosen[self.rng.choice((" ", " ", " ", ", ")).join(words) if self.rng.random() < 0.15 else " ".join(words)] = None
        return list(chosen)

    def serials(self, count: int) -> list[str]:
        """Returns `count` distinct codes (at most 99) that differ in their number, such as `p17` and `p204`."""
        head = self.rng.choice((self._code, self.word))().rstrip("0123456789-_")
        head = self.rng.choice((head.lower(), head)) + self.rng.choice(("", "", "-", "_"))
        return [f"{head}{number}" for number in self.rng.sample(range(1, self.rng.choice((100, 1000))), count)]

    def _new(self, make: Callable[[], str]) -> str:
        while True:
            name = make()
            if name not in self.given:
                self.given.add(name)
                return name

    def _english(self) -> str:
        return self.rng.choice(ENGLISH)

    def _blend(self) -> str:
        head, tail = self.rng.choice(ENGLISH), self.rng.choice(ENGLISH)
        return head[: self.rng.randint(1, len(head) - 1)] + tail[self.rng.randint(1, len(tail) - 1) :]

    def _coined(self) -> str:
        rng = self.rng
        parts = [rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        if rng.random() < 0.06:
            parts.insert(rng.randrange(len(parts) + 1), rng.choice(ACCENTED))
        if rng.random() < 0.15:
            parts.insert(0, rng.choice("aeiou"))
        return "".join(parts)

    def _cased(self, word: str) -> str:
        return word.upper() if self.rng.random() < 0.05 else word.capitalize() if self.rng.random() < 0.75 else word

    def _column(self) -> str:
        return self._wild_column() if self.wild else self._plain_column()

    def _plain_column(self) -> str:
        rng = self.rng
        name = rng.choice("_ ").join(self.word() for _ in range(rng.choice((1, 1, 2))))
        name = name.title() if rng.random() < 0.25 else name
        return f"{name} ({rng.choice(UNITS)})" if rng.random() < 0.2 else name

    def _wild_column(self) -> str:
        rng = self.rng
        if rng.random() < 0.08:
            return self._code().lower()
        words = [self.word() for _ in range(rng.choice((1, 1, 2, 2, 2, 3)))]
        if len(words) == 2 and rng.random() < 0.12:
            words.insert(1, rng.choice(JOINERS))
        if rng.random() < 0.15:
            words.insert(rng.randrange(len(words) + 1), rng.choice(COMMON))
        if rng.random() < 0.15:
            words[rng.randrange(len(words))] += rng.choice(("", "_", " ")) + str(rng.choice((rng.randint(1, 9), rng.randint(10, 999))))
        style = rng.choice(("snake", "snake", "snake", "space", "space", "space", "title", "camel", "upper", "kebab", "slash", "dot"))
        if style == "camel":
            return words[0] + "".join(word.capitalize() for word in words[1:])
        if style == "upper":
            return "_".join(words).upper()
        name = {"snake": "_", "space": " ", "title": " ", "kebab": "-", "slash": "/", "dot": "."}[style].join(words)
        name = name.title() if style == "title" else name
        if style in ("space", "title") and rng.random() < 0.5:
            return f"{name} ({rng.choice(UNITS)})"
        return f"{name}_{rng.choice(UNITS)}" if style == "snake" and rng.random() < 0.1 else name

    def _stem(self) -> str:
        return self._wild_stem() if self.wild else self._plain_stem()

    def _plain_stem(self) -> str:
        stem = "_".join(self.word() for _ in range(self.rng.choice((1, 1, 2))))
        return f"{stem}_{self.rng.randint(1, 99)}" if self.rng.random() < 0.2 else stem

    def _wild_stem(self) -> str:
        rng = self.rng
        words = [self.word() for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        if rng.random() < 0.15:
            words.insert(rng.randrange(len(words) + 1), rng.choice(COMMON))
        style = rng.choice(("_", "_", "-", "", "camel", "."))
        stem = "".join(w.capitalize() for w in words) if style == "camel" else style.join(words)
        if rng.random() < 0.4:
            stem += rng.choice(("_", "-", "")) + str(rng.choice((rng.randint(1, 99), rng.randint(1990, 2030))))
        return stem

    def _value(self) -> str:
        rng = self.rng
        style = rng.random()
        if style < 0.4:
            return self._cased(self.word())
        if style < 0.6:
            return self.word()
        if style < 0.75:
            return f"{self._cased(self.word())} {self._cased(self.word())}"
        if style < 0.85:
            return self.word() + rng.choice(("_", "-", " ")) + str(rng.randint(0, 20))
        return self._code()

    def _code(self) -> str:
        """Returns two to four letters, half of the time with a number. The letters count as a word, so the splits' codes also differ."""
        rng = self.rng
        while True:
            letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.choice((1, 2, 2, 3, 4))))
            if belongs(letters) is self.split:
                return letters + (rng.choice(("", "-", "_")) + str(rng.randint(1, 99)) if rng.random() < 0.5 else "")
