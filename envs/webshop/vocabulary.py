"""The words that the generator makes its catalogue of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of product."""

    noun: str
    """What titles and instructions call it; all its words are nouns."""
    section: str
    """Where it stands within its category, as in "Shoes › Boots"."""
    groups: str
    """Names of the option groups that it may have, of `OPTIONS`."""
    prices: tuple[int, int]
    """Range of its price, in dollars."""


@dataclass(frozen=True)
class Category:
    """One family of products."""

    department: str
    audiences: tuple[str, ...]
    """Whom its products are for; part of the noun. Empty: for anybody."""
    materials: tuple[str, ...]
    """Nouns."""
    attributes: tuple[str, ...]
    kinds: tuple[Kind, ...]


BRANDS = tuple(start + end for start in ("Ald", "Bram", "Cor", "Dul", "Est", "Fen", "Gal", "Hol", "Kel", "Nor")
               for end in ("dane", "ford", "ley", "mere", "ric", "tess", "vona", "wick"))

# No value matches another of its group as a purchase: "pack of 2" would pass for "pack of 6", "large" for "x-large".
OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "color": ("color", ("black", "white", "red", "blue", "navy blue", "light blue", "dark green", "teal", "olive",
                        "burgundy", "charcoal", "ivory", "lavender", "mustard", "coral", "brown", "rose gold")),
    "letters": ("size", ("xs", "s", "m", "l", "xl", "xxl")),
    "shoe": ("size", ("5", "6", "7", "8", "9", "10", "11", "12")),
    "width": ("width", ("narrow", "regular", "wide")),
    "length": ("length", ("3 feet", "6 feet", "10 feet", "25 feet")),
    "storage": ("capacity", ("16 gb", "32 gb", "64 gb", "128 gb")),
    "plug": ("plug", ("us", "uk", "eu", "au")),
    "volume": ("size", ("8 oz", "16 oz", "32 oz", "64 oz")),
    "pieces": ("pieces", ("single", "2-pack", "3-pack", "6-pack")),
    "bed": ("size", ("twin", "full", "queen", "king")),
    "finish": ("finish", ("walnut", "oak", "espresso", "white", "maple")),
    "firmness": ("firmness", ("soft", "medium", "firm")),
    "scent": ("scent", ("lavender", "eucalyptus", "citrus", "rose", "sandalwood", "unscented")),
    "flavor": ("flavor", ("vanilla", "chocolate", "strawberry", "honey", "cinnamon", "ginger", "lemon")),
    "pattern": ("pattern", ("solid", "striped", "floral", "plaid", "polka dot")),
    "weight": ("weight", ("5 lb", "12 lb", "20 lb", "30 lb")),
    "pet": ("pet size", ("toy", "little", "middling", "giant")),
}
"""By name: what the page calls the group, and its values."""

CATEGORIES: dict[str, Category] = {
    "apparel": Category(
        "Clothing", ("women's", "men's", "kids'"), ("cotton", "linen", "wool", "polyester", "bamboo"),
        ("machine washable", "slim fit", "long sleeve", "quick drying", "moisture wicking", "elastic waist",
         "wrinkle free", "relaxed fit", "hand wash only", "breathable fabric"),
        (Kind("hoodie", "Tops › Hoodies", "color letters", (18, 70)), Kind("dress shirt", "Tops › Shirts",
         "color letters pattern", (20, 90)), Kind("pajama set", "Sleepwear › Pajamas", "letters pattern", (15, 60)),
         Kind("rain jacket", "Outerwear › Jackets", "color letters", (35, 180)),
         Kind("yoga pants", "Bottoms › Pants", "color letters", (15, 65)))),
    "footwear": Category(
        "Shoes", ("women's", "men's"), ("leather", "canvas", "suede", "rubber", "mesh"),
        ("non slip", "memory foam insole", "arch support", "water resistant", "steel toe", "lace up",
         "lightweight sole", "vegan friendly", "wide toe box", "shock absorbing"),
        (Kind("hiking boots", "Outdoor › Boots", "color shoe width", (40, 220)), Kind("running shoes",
         "Athletic › Running", "color shoe width", (35, 160)), Kind("loafers", "Casual › Loafers",
         "color shoe", (30, 140)), Kind("sandals", "Casual › Sandals", "color shoe", (15, 80)),
         Kind("rain boots", "Outdoor › Rain", "color shoe pattern", (25, 90)))),
    "accessories": Category(
        "Accessories", ("women's", "men's"), ("leather", "canvas", "nylon", "titanium", "straw"),
        ("scratch resistant", "adjustable strap", "rfid blocking", "polarized lenses", "hypoallergenic metal",
         "hidden pocket", "foldable design", "uv protection", "gift box included"),
        (Kind("wallet", "Wallets › Bifold", "color", (10, 90)), Kind("sun hat", "Hats › Sun",
         "color letters", (10, 50)),
         Kind("wrist watch", "Watches › Analog", "color width", (25, 400)),
         Kind("backpack", "Bags › Backpacks", "color pattern", (20, 150)),
         Kind("belt", "Belts › Casual", "color letters width", (10, 60)))),
    "electronics": Category(
        "Electronics", (), ("aluminum", "silicone", "nylon", "carbon fiber"),
        ("fast charging", "noise cancelling", "plug and play", "long battery life", "dust proof", "voice controlled",
         "energy efficient", "high definition", "over current protection", "wireless connection"),
        (Kind("charging cable", "Accessories › Cables", "color length pieces", (5, 35)), Kind("usb drive",
         "Storage › Flash", "color storage", (6, 60)), Kind("power bank", "Accessories › Power",
         "color plug", (15, 90)),
         Kind("headphones", "Audio › Headphones", "color", (20, 350)),
         Kind("action camera", "Video › Cameras", "storage plug color", (60, 450)))),
    "kitchen": Category(
        "Kitchen", (), ("stainless steel", "ceramic", "bamboo", "glass", "silicone"),
        ("dishwasher safe", "bpa free", "heat resistant", "leak proof", "rust proof", "easy clean coating",
         "microwave safe", "double wall insulation", "space saving"),
        (Kind("water bottle", "Drinkware › Bottles", "color volume", (8, 45)), Kind("coffee mug", "Drinkware › Mugs",
         "color volume pieces", (7, 40)), Kind("mixing bowl", "Bakeware › Bowls", "color pieces", (10, 60)),
         Kind("cutting board", "Tools › Boards", "finish pieces", (10, 70)),
         Kind("electric kettle", "Appliances › Kettles", "color plug volume", (20, 120)))),
    "furniture": Category(
        "Furniture", (), ("pine", "steel", "rattan", "velvet", "bamboo"),
        ("easy assembly", "solid wood frame", "mid century style", "weight bearing", "anti tip kit",
         "height adjustable", "storage drawer", "swivel base", "stackable frame"),
        (Kind("bookcase", "Storage › Bookcases", "finish", (60, 400)), Kind("bar stool", "Seating › Stools",
         "color pieces", (45, 300)), Kind("coffee table", "Tables › Coffee", "finish", (70, 500)),
         Kind("bed frame", "Bedroom › Frames", "bed finish", (120, 1200)),
         Kind("office chair", "Seating › Office", "color firmness", (80, 600)))),
    "bedding": Category(
        "Bedding", (), ("cotton", "bamboo", "linen", "microfiber", "latex"),
        ("machine washable", "cooling gel", "fade resistant", "deep pockets", "allergen barrier", "thick filling",
         "non iron finish", "double stitched"),
        (Kind("sheet set", "Linens › Sheets", "color bed", (20, 150)), Kind("pillow", "Pillows › Bed",
         "firmness pieces bed", (15, 110)), Kind("comforter", "Covers › Comforters", "color bed pattern", (35, 220)),
         Kind("mattress topper", "Mattresses › Toppers", "bed firmness", (50, 350)),
         Kind("throw blanket", "Covers › Throws", "color pattern", (15, 80)))),
    "beauty": Category(
        "Beauty", (), ("charcoal", "clay", "honey", "jojoba", "collagen"),
        ("cruelty free", "paraben free", "sensitive skin", "long lasting", "fragrance free", "dermatologist tested",
         "alcohol free", "deep moisture", "anti aging", "travel friendly"),
        (Kind("face cream", "Skin Care › Creams", "scent volume", (8, 80)), Kind("shampoo", "Hair Care › Shampoos",
         "scent volume pieces", (6, 45)), Kind("deodorant", "Body Care › Deodorants", "scent pieces", (5, 25)),
         Kind("hand soap", "Body Care › Soaps", "scent volume pieces", (4, 30)),
         Kind("hair dryer", "Tools › Dryers", "color plug", (20, 200)))),
    "grocery": Category(
        "Grocery", (), ("almond", "oat", "quinoa", "coconut", "hemp"),
        ("gluten free", "non gmo", "low sodium", "keto friendly", "certified organic", "no artificial colors",
         "high protein", "dairy free", "sugar free", "kosher certified"),
        (Kind("protein bar", "Snacks › Bars", "flavor pieces", (3, 40)), Kind("granola", "Breakfast › Granola",
         "flavor volume", (5, 35)), Kind("herbal tea", "Beverages › Tea", "flavor pieces", (4, 30)),
         Kind("cookie mix", "Baking › Mixes", "flavor pieces volume", (4, 28)),
         Kind("nut butter", "Spreads › Butters", "flavor volume", (6, 32)))),
    "garden": Category(
        "Garden", (), ("cedar", "terracotta", "steel", "polyethylene", "jute"),
        ("weather proof", "rust proof", "solar powered", "self watering", "drainage holes", "kink free", "uv resistant",
         "easy assembly", "freeze tolerant"),
        (Kind("plant pot", "Planters › Pots", "color pieces", (8, 60)), Kind("garden hose", "Watering › Hoses",
         "color length", (15, 90)), Kind("string lights", "Lighting › String", "length plug color", (12, 70)),
         Kind("bird feeder", "Wildlife › Feeders", "color finish", (12, 65)),
         Kind("patio umbrella", "Patio › Umbrellas", "color pattern", (40, 250)))),
    "sports": Category(
        "Sports", (), ("neoprene", "cork", "rubber", "iron", "foam"),
        ("non slip", "sweat proof", "extra thick", "carrying bag included", "latex free", "anti burst",
         "odor resistant", "adjustable height", "shock absorbing"),
        (Kind("yoga mat", "Fitness › Mats", "color pattern", (12, 90)), Kind("kettlebell", "Fitness › Weights",
         "weight color", (15, 150)), Kind("resistance bands", "Fitness › Bands", "firmness color pieces", (8, 45)),
         Kind("bike helmet", "Cycling › Helmets", "color letters", (20, 160)),
         Kind("camping tent", "Camping › Tents", "color pattern", (45, 380)))),
    "pets": Category(
        "Pets", ("dog", "cat"), ("nylon", "cotton", "rope", "salmon", "plush"),
        ("grain free", "chew proof", "machine washable", "reflective stitching", "non toxic", "vet recommended",
         "calming effect", "water resistant", "no pull design"),
        (Kind("bed", "Furniture › Beds", "color pet", (15, 120)), Kind("harness", "Walking › Harnesses",
         "color pet pattern", (10, 55)), Kind("treats", "Food › Treats", "flavor pieces", (4, 35)),
         Kind("food bowl", "Feeding › Bowls", "color volume", (6, 40)),
         Kind("carrier", "Travel › Carriers", "color pet", (20, 130)))),
}

OPENINGS = ("i'm looking for {}", "i need {}", "find me {}", "i want to buy {}", "please help me find {}",
            "i would like {}", "can you get me {}", "show me {}")
THINGS = ("{attributes} {noun}", "a {noun} that is {attributes}", "{noun} with these features: {attributes}",
          "some {attributes} {noun}")
"""An instruction's ways to say what is wanted; `{attributes}` is a list with commas or "and"."""
OPTION_WAYS = {
    "color": ("in {}", "color: {}", "in the {} color"), "size": ("size {}", "in size {}", "size: {}"),
    "pieces": ("as {}", "pieces: {}"), "flavor": ("{} flavor", "flavor: {}"), "scent": ("{} scent", "scent: {}"),
    "finish": ("with a {} finish", "finish: {}"),
}
"""By group: ways to ask for a value; for others, `OTHER_OPTION_WAYS` of the group and the value."""
OTHER_OPTION_WAYS = ("{0}: {1}", "with {1} {0}", "the {1} {0}")
PRICE_WAYS = (", and price lower than {:.2f} dollars", " for less than {:.2f} dollars", ", under {:.2f} dollars",
              ", and my budget is {:.2f} dollars")
PRAISE = ((5, "Exactly what I wanted", "As they say: {attribute}."),
          (4, "Good value", "Well made for the price."),
          (3, "It is fine", "Not bad, but I expected more of this {noun}."),
          (2, "Not for me", "I sent the {noun} back."))
"""Reviews: stars, title, body."""
