"""The closed world of the demo model: the things it can name, their categories, the shapes and the colours.

Only visually distinct things are listed: what a tower of five million parameters can tell apart in two hours of training.
"""

# category -> "emoji(s) name; ...".  Several emoji may share one name.
PICTOGRAMS = {
    "animal": "🐱🐈 cat;🐶🐕 dog;🐭🐁 mouse;🐰🐇 rabbit;🦊 fox;🐻 bear;🐼 panda;🐨 koala;🐯🐅 tiger;🦁 lion;🐮🐄 cow;🐷🐖 pig;"
    "🐸 frog;🐵 monkey;🐔 chicken;🐧 penguin;🐦 bird;🦆 duck;🦉 owl;🦇 bat;🐴🐎 horse;🦄 unicorn;🐝 bee;🦋 butterfly;🐌 snail;"
    "🐞 ladybug;🕷 spider;🐢 turtle;🐍 snake;🐙 octopus;🦀 crab;🐠🐟 fish;🐬 dolphin;🐳🐋 whale;🦈 shark;🐊 crocodile;"
    "🐘 elephant;🐪🐫 camel;🦒 giraffe;🐑 sheep;🐿 squirrel;🦔 hedgehog;🦕 dinosaur;🐉 dragon;🦩 flamingo",
    "plant": "🌵 cactus;🌳 tree;🌴 palm tree;🍀 clover;🍁 maple leaf;🌹 rose;🌷 tulip;🌻 sunflower;🍄 mushroom",
    "food": "🍎🍏 apple;🍐 pear;🍋 lemon;🍌 banana;🍉 watermelon;🍇 grapes;🍓 strawberry;🍒 cherries;🍍 pineapple;🥝 kiwi;"
    "🍅 tomato;🍆 eggplant;🥑 avocado;🥦 broccoli;🌽 corn;🥕 carrot;🍞 bread;🥐 croissant;🥨 pretzel;🧀 cheese;🍔 hamburger;"
    "🍟 fries;🍕 pizza;🌭 hot dog;🌮 taco;🍦🍨 ice cream;🍩 donut;🍪 cookie;🎂🍰 cake;🧁 cupcake;🍭 lollipop;🍿 popcorn",
    "drink": "☕ coffee;🍷 wine;🍺 beer;🥛 milk;🍹🍸 cocktail",
    "vehicle": "🚗🚘 car;🚌 bus;🚑 ambulance;🚚🚛 truck;🚜 tractor;🏍 motorcycle;🚲 bicycle;🚂 train;🚁 helicopter;✈ airplane;"
    "🚀 rocket;🛸 UFO;⛵ sailboat;🚢 ship",
    "building": "🏠🏡 house;🏰 castle;⛪ church;⛺ tent;🏭 factory;🎡 Ferris wheel",
    "nature": "☀🌞 sun;🌙 moon;🌈 rainbow;☁ cloud;⚡ lightning;❄ snowflake;⛄ snowman;🔥 fire;🌋 volcano;🌍🌎🌏 globe;🪐 planet",
    "character": "👻 ghost;💀 skull;👽 alien;🤖 robot;🎃 pumpkin;😀😃 smiley;😭 crying face;😡 angry face;🎅 Santa Claus",
    "body part": "👁 eye;👂 ear;👃 nose;🦷 tooth;🦴 bone;👍 thumbs up;✋ hand;👣 footprints;🧠 brain",
    "tool": "🔨 hammer;🔧 wrench;✂ scissors;🪓 axe;🧲 magnet;🔬 microscope;🔭 telescope;🔑 key;🔒 lock;⚙ gear;💉 syringe;"
    "📎 paperclip;✏ pencil;🔍 magnifying glass;🧭 compass;🛡 shield",
    "object": "☎ telephone;💻 laptop;📷 camera;📺 television;📻 radio;⏰ alarm clock;⌚ watch;⏳ hourglass;💡 light bulb;"
    "🕯 candle;🪑 chair;🚽 toilet;🧸 teddy bear;🎁 gift;🎈 balloon;📦 box;✉ envelope;📖 book;💎 gem;👑 crown;🏆 trophy;"
    "🔔 bell;🗑 trash can;🛒 shopping cart;🎒 backpack;👓 glasses;🚩 flag;💣 bomb;🔋 battery;☂☔ umbrella;⚓ anchor",
    "clothing": "👕 shirt;👖 jeans;👗 dress;👔 tie;👟 shoe;👢 boot;🎩 hat;🧦 socks",
    "toy or game": "⚽ soccer ball;🏀 basketball;🏈 football;🎳 bowling pins;🎯 target;🎲 die;🧩 puzzle piece;🎮 game controller;🪁 kite",
    "musical instrument": "🎸 guitar;🎹 piano;🎺 trumpet;🎻 violin;🥁 drum;🎷 saxophone;🎤 microphone",
    "sign": "🛑 stop sign;⚠ warning sign;🚦 traffic light;♻ recycling symbol;✅✔ check mark;❓ question mark;🎵 music note",
}
CATEGORY_ANSWER = {
    "animal": "an animal", "plant": "a plant", "food": "food", "drink": "a drink", "vehicle": "a vehicle",
    "building": "a building", "nature": "something in nature", "character": "a character", "body part": "a body part",
    "tool": "a tool", "object": "an object", "clothing": "clothing", "toy or game": "a toy or game",
    "musical instrument": "a musical instrument", "sign": "a sign",
}
CATEGORIES = list(CATEGORY_ANSWER)
PLURAL = {"grapes", "cherries", "fries", "footprints", "scissors", "glasses", "jeans", "socks", "bowling pins"}
NO_ARTICLE = PLURAL | {"broccoli", "corn", "bread", "cheese", "ice cream", "popcorn", "coffee", "wine", "beer", "milk",
                       "lightning", "fire", "thumbs up", "Santa Claus"}
SHAPES = ["circle", "square", "triangle", "star", "rectangle", "diamond", "heart", "hexagon", "pentagon", "cross", "oval", "ring"]
COLOURS = {
    "red": (220, 30, 35), "green": (35, 150, 50), "blue": (35, 75, 215), "yellow": (245, 220, 45), "orange": (245, 135, 20),
    "purple": (125, 45, 165), "pink": (248, 140, 185), "brown": (120, 70, 30), "black": (18, 18, 20),
    "white": (250, 250, 250), "gray": (130, 130, 132),
}
COLOUR_NAMES = list(COLOURS)
CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # case-insensitive character classes
CANT = "I can't see that in the picture."


def pictograms() -> tuple[list[tuple[str, str, str]], list[str]]:
    """All (emoji, name, category) rows and the ordered list of distinct names."""
    rows: list[tuple[str, str, str]] = []
    names: list[str] = []
    for category, text in PICTOGRAMS.items():
        for part in text.split(";"):
            chars, name = part.split(" ", 1)
            names.append(name)
            rows += [(c, name, category) for c in chars if c != "\ufe0f"]
    return rows, names


def is_plural(name: str) -> bool:
    """Whether a thing's name takes a plural verb."""
    return name in PLURAL


def with_article(noun: str) -> str:
    """'a cat', 'an orange star', 'scissors'."""
    if noun in NO_ARTICLE:
        return noun
    return ("an " if noun[0].lower() in "aeio" or noun.startswith("umb") else "a ") + noun
