"""Wordings: how people ask the same thing about a picture in many ways.

A wording is a pattern: (a|b|) stands for one of its alternatives, <name> for a pattern of FRAGMENTS, {name} for a word that
questions.py fills in.  `pick` draws one; it never draws a wording of HELD_OUT, which eval.py keeps to ask what was never trained.
"""
import random
import re

FRAGMENTS = {
    "picture": "(the picture|this picture|the image|this image|the picture|the image|the pic|this drawing)",
    "ask": "(Can you tell me|Could you tell me|Please tell me|Do you know|I want to know|I would like to know|Any idea|Let me know|I wonder|Can you say)",
    "polite": "(Please|Can you|Could you|Would you|Can you please|Could you please|Will you)",
    "color": "(color|color|colour)",
    "thing": "(object|thing|item|object)",
    "things": "(objects|things|items|objects)",
    "see": "(see|see|notice|spot|recognize|make out)",
}
# Asked of one thing and of several alike.
LOOK = ("What is in the picture?", "What is this?", "What do you see?", "What can you see in the image?", "What's in this image?",
        "What is shown here?", "What does the picture show?", "What do you see in this picture?", "What is shown in the image?",
        "What can you see?", "What's in the picture?", "What is in this picture?", "What do you see here?",
        "What (do|can) you <see>(| here| there| in <picture>)?", "What does <picture> (show|depict|contain|have in it)?",
        "What( is|'s) (shown|depicted|displayed|drawn|pictured|visible|on display)(| here| there| in <picture>)?",
        "What( is|'s) (in|on) <picture>(| please)?", "<ask> what (is|you see) (in|on) <picture>?",
        "<ask> what is (shown|there|here)?",
        "What (do we have|do you have|did you find|is there to see|have you got) (here|there|in <picture>)?",
        "(Look|Take a look) at <picture>. What (is there|do you see)?",
        "What am I (looking at|seeing)(| here)?", "What are we looking at(| here)?",
        "(Here is|This is) (my|a) (picture|image|drawing). What do you see?")
WHAT = LOOK + (
    "Name the object in the picture.", "Tell me what this is.", "What is it?", "What's this?", "What is that?", "Name it.",
    "Identify the object.",
    "What object is this?", "Which object is shown?", "Can you tell me what is in the picture?", "What is it?", "What's this?",
    "<ask> what (this|it|that|this thing|the <thing>) is(| called| supposed to be)?", "Any idea what (it|that) (might|could) be?",
    "What (could|would|can|may) (this|that|it|this thing) be?", "What do you think (this|it|that) is?",
    "What would you (call|say) (this|it|that)( is|)?",
    "What (<thing>|object) (is|do you see|can you see) (here|there|in <picture>)?",
    "Which (object|item|icon) (is this|is it|do you see|is shown|is depicted|can you see)(| here)?",
    "(Name|Identify|Recognize|Label) (this|it|that|the <thing>|this <thing>|the icon|the emoji|what is shown|what you see)(|, please).",
    "<polite> (name|identify|recognize|label) (it|the <thing>|this <thing>|that <thing>|this icon|what is shown|what you see)?",
    "What( is|'s) (this|that|the) (<thing>|icon|emoji|pictogram|symbol)(| called| here| supposed to be)?",
    "What (does|would) (this|that|it|this icon|the drawing) (represent|depict|look like|show|stand for)?",
    "What do (people|you) call (this|that|this <thing>)?",
    "(It|This|That) is what?", "I (see|have) something here, what is it?",
    "(Look|Guess|Question|Quick question): what( is|'s) (this|it)?",
    "Guess what (this|it) is.", "(Do|Can) you (recognize|know|identify|guess) (this|it|what this is|what it is|the <thing>)?",
    "What( is|'s) the name of (this|the) (thing|object|item|icon)?",
    "(In one word|In short|Briefly|Short answer), what (is it|is this|do you see)?",
    "(Object|Name)?", "What kind of picture is it, what does it show?", "(whats|wats|what) this?",
    "(Give|Tell) me the name of (this|the) <thing>.")
WHAT_ALL = LOOK + (
    "Name everything you see.", "List the objects.", "What objects are in the picture?", "Name all the things.",
    "What things do you see?",
    "List everything in the picture.", "Which objects do you see?",
    "What <things> (are there|are shown|are here|are in <picture>|do you see|can you <see>)?",
    "Which <things> (are|can you see|do you see) (in <picture>|here)?",
    "Which <things> (does <picture> (show|contain)|are (shown|visible|there))?",
    "(List|Name|Enumerate) (all|all the|the) <things>(| you see| in <picture>| that you can see).",
    "<polite> (list|name|enumerate) (everything|all <things>|all the <things>|the <things>)(| in <picture>| you see)?",
    "What are (these|those|the things|the objects)(| here| in <picture>)?", "What (all|else|everything) is in <picture>?",
    "Everything you see(|, please)?",
    "(Tell me|Name|List) everything (you see|that is there|there is|shown).",
    "<ask> what <things> (are there|you see|are in <picture>)?", "From left to right, what do you see?")
DESCRIBE = (
    "Describe the picture.", "Describe the image.", "Describe this picture.", "Describe this image.",
    "Please describe what you see.",
    "Give a short description of the image.", "Write a caption for this picture.", "Caption this image.",
    "Describe this image in one sentence.",
    "Describe it.", "Can you describe this picture?", "Describe what you see.", "Give me a description.",
    "<polite> describe (<picture>|this|it|the scene|what you see|what is shown)(| for me| briefly| in one sentence)?",
    "Describe (<picture>|this|the scene|it|everything)(| briefly| in one sentence| in a few words| for me| in a sentence| in detail| please).",
    "(Give|Write|Make|Provide) (me |)(a|a short|a brief|one) (description|caption|summary) (of|for) (<picture>|this|it).",
    "What would be a good (caption|description)(| for <picture>)?",
    "(I need|I want|I would like) a (caption|description)(| of <picture>).",
    "How would you describe (<picture>|this|the scene|it)?", "(Tell me|Say something|Write something) about <picture>.",
    "What( is|'s) (happening|going on)(| here| in <picture>)?",
    "Explain <picture>(| to me).", "(Caption|Description)(|, please).",
    "<polite> (caption <picture>|write a caption|give me a description)?", "Summarize <picture>.")
READ = ("What does it say?", "What is written in the picture?", "Read the text.", "What does the text say?", "What text is shown?",
        "Please read what is written here.", "What is written here?", "Which text do you see?", "Read this.", "Read it.",
        "What is the text?", "What's written here?", "Can you read this?", "What does the picture say?",
        "What does (it|this|that|<picture>|the text|the writing|the sign|this sign|the label) (say|read)?",
        "<polite> read (this|it|that|the text|the writing|what it says|what is written)(| for me| to me| aloud)?",
        "What( is|'s) (written|spelled|printed|the writing|the text)(| here| there| in <picture>| on it)?",
        "<ask> what (it|this|the text|the sign|the writing) says?",
        "(Read|Transcribe|Copy|Spell out) (the text|the writing|what is written|what it says|the characters|this)(| for me| to me|, please).",
        "What text (is this|is it|is here|is in <picture>|is there|do you see|can you read)?",
        "Which (text|letters|characters) (do you see|can you read|can you see)?",
        "(Text|Writing)?", "What can you read(| here| in <picture>)?", "What does the (text|writing) in <picture> say?")
READ_NUMBER = ("What number is shown?", "What number is this?", "Which number do you see?", "Read the number.",
               "What is the number?", "What number do you see?",
               "(What|Which) number (is it|is shown|is written|is in <picture>|is here|do you see|can you read|can you see|does it show)?",
               "<polite> (read|tell me) (the|this) number?", "<ask> (what|which) number (it is|this is|is shown|is written)?",
               "(The number|Number)?",
               "(What|Which) digits (do you see|are shown|are there)?", "What( is|'s) the number(| here| in <picture>| shown)?")
READ_WORD = ("What word is shown?", "What word is this?", "Which word do you see?", "Read the word.", "What is the word?",
             "What word do you see?",
             "(What|Which) word (is it|is shown|is written|is in <picture>|is here|do you see|can you read|can you see|does it show)?",
             "<polite> (read|tell me) (the|this) word?", "<ask> (what|which) word (it is|this is|is shown|is written)?",
             "(The word|Word)?",
             "(What|Which) letters (do you see|are shown|are there)?", "What( is|'s) the word(| here| in <picture>| shown)?")
BACKGROUND = ("What color is the background?", "What colour is the background?", "Which color is the background?",
              "What is the background color?",
              "What is the color of the background?", "Background color?", "What color is behind it?",
              "(What|Which) <color> (is|has) the (background|backdrop)(| of <picture>| here)?",
              "What( is|'s) the (background <color>|<color> of the (background|backdrop))(| here| please)?",
              "(What|Which) <color> does the background have?",
              "(What|Which) <color> is (behind (it|everything|the object|them)|it drawn on|in the background)?",
              "(Name|Tell me) the (background <color>|<color> of the background).",
              "<ask> (what|which) <color> the background (is|has)?",
              "<ask> the <color> of the background?", "On (what|which) <color> is it drawn?", "(Background|The background)?")
COUNT = ("How many objects are there?", "How many things are there?", "How many objects do you see?", "Count the objects.",
         "How many things do you see?",
         "How many objects are in the picture?", "How many?", "How many things are in the image?", "How many items are there?",
         "How many are there?",
         "How many <things> (are there|are here|are shown|are visible|are in <picture>|do you see|can you see|can you count|do you count|does <picture> (show|contain|have))?",
         "(Count|<polite> count) (the|all|all the) <things>(| in <picture>| you see| for me).",
         "What is the (number|count) of <things>(| in <picture>)?",
         "<ask> how many <things> (there are|you see|are in <picture>|are there)?", "(Number of <things>|Object count)?",
         "How many (of them|things|objects|do you see|in total|in all)?",
         "In total, how many <things> are there?", "Count (them|everything|all).")
COUNT_SHAPES = ("How many shapes are there?", "How many shapes do you see?", "How many shapes are in the picture?",
                "Count the shapes.",
                "How many (shapes|figures) (are there|are shown|are in <picture>|can you see|can you count|do you count|does <picture> (show|contain|have))?",
                "<ask> how many shapes (there are|you see|are in <picture>)?", "(Number of shapes|<polite> count the shapes)?")
CATEGORY = ("What kind of thing is it?", "What kind of thing is this?", "What category does it belong to?",
            "What type of thing is shown?",
            "What kind of object is this?", "Which category is it?", "What sort of thing is it?",
            "What (kind|sort|type|category) of <thing> (is it|is this|is that|is shown|is in <picture>|do you see)?",
            "(What|Which) category (is it|is this|is it in|does (it|this|this <thing>) belong to|fits)?",
            "<ask> what (kind|sort|type) of <thing> (it|this) is?",
            "(Category|Kind|Type)?", "<polite> (classify|categorize) (it|this|the <thing>)?",
            "What category would you put (it|this) in?")
THERE = ("Is there {a} in the picture?", "Is there {a}?", "Do you see {a}?", "Can you see {a}?", "Can you see {a} in the image?",
         "Is there {a} in the image?",
         "Is there {a}( in <picture>| here| anywhere|)?", "(Do|Can) you (see|spot|notice|find) {a}( in <picture>| here| there|)?",
         "Does <picture> (show|contain|have) {a}?", "Is {a} (in <picture>|shown|visible|here|there)?", "Is there {a} to be seen?", "<ask> if there is {a}?", "{a} (in <picture>|here)?")
THERE_MANY = ("Are there {a} in the picture?", "Do you see {a}?", "Are there any {a}?", "Are there {a}( in <picture>| here|)?",
              "(Do|Can) you (see|spot|find) (any |){a}?",
              "Does <picture> (show|contain|have) {a}?", "Are (any |){a} (in <picture>|shown|visible|here)?")
IS_IT = ("Is this {a}?", "Is it {a}?", "Is (this|it|that) {a}?", "Would you say (this|it) is {a}?",
         "(It|This|That) is {a}, (right|isn't it|correct)?", "Does (this|it) look like {a}?",
         "Could (this|it) be {a}?", "Do you think (this|it) is {a}?", "Does <picture> show {a}?")
COLOUR_OF = ("What <color> is the {name}?", "Which <color> is the {name}?", "What is the <color> of the {name}?",
             "What <color> does the {name} have?",
             "(What|Which) <color> (is|has) the {name}( in <picture>| here|)?",
             "What('s| is) the (<color> of the {name}|{name}'s <color>)?", "<ask> (what|which) <color> the {name} (is|has)?",
             "In (what|which) <color> is the {name}( drawn| painted|)?", "The {name}, what <color> is it?",
             "<color> of the {name}?", "<polite> (tell me|name) the <color> of the {name}?")
COLOUR_OF_IT = ("What <color> is it?", "Which <color> is it?", "What <color> is this?",
                "(What|Which) <color> (is|has) (it|this|the shape|the object)?", "What is (its <color>|the <color> of it)?",
                "<color>?", "<ask> (what|which) <color> it is?")
SHAPE_OF = ("What shape is the {name} object?", "What is the {name} shape?", "Which shape is {name}?", "What shape is {name}?",
            "What is {name}?",
            "What (shape|form|figure) is (the {name} (object|one|thing)|{name})(| here)?",
            "What('s| is) the {name} (shape|object|thing|figure|one)?", "Which (shape|object|figure|thing) is {name}?",
            "<ask> what the {name} (shape|object|thing) is?", "(Name|Identify) the {name} (shape|object|thing).",
            "What {name} (thing|object|shape) (do you see|is there|is shown)?")
SHAPE_OF_IT = ("What shape is it?", "What shape is this?", "Which shape do you see?", "What shape?",
               "(What|Which) (shape|figure|form) (is it|is this|is shown|do you see|can you see|is in <picture>)?",
               "<ask> what shape (it|this) is?", "Name the shape.")
COUNT_OF = ("How many {names} are there?", "How many {names} do you see?", "Count the {names}.",
            "How many {names}( are in <picture>| can you see| can you count| are shown| are here|)?", "<polite> count the {names}?",
            "(Number of|What is the number of) {names}?",
            "<ask> how many {names} there are?", "How many of them are {names}?")
COUNT_COLOUR = ("How many {name} shapes are there?", "How many {name} objects are there?", "How many objects are {name}?",
                "How many (objects|shapes|things|figures) are {name}(| here| in <picture>)?",
                "How many {name} (objects|shapes|things|ones) (do you see|are in <picture>|can you count)?",
                "Count the {name} (objects|shapes|things).", "<ask> how many (objects|shapes|things) are {name}?")
EXTREME = ("What is the {name} object?", "Which object is the {name}?", "What is the {name} shape?",
           "What('s| is) the {name} (object|shape|thing|one|figure)(| here| in <picture>)?",
           "Which (object|shape|thing|one) is (the |){name}?", "Name the {name} (object|shape|thing).",
           "<ask> which (object|shape|thing) is the {name}?")
AT_END = ("What is on the {end}?", "What is at the {end}?", "Which object is on the {end}?",
          "What('s| is) (on|at) the {end}( side|)( of <picture>|)?",
          "(What|Which) (object|thing|item) (is|do you see) (on|at) the {end}?", "What do you see (on|at) the {end}( side|)?",
          "<ask> what is (on|at) the {end}?")
FROM_LEFT = ("What is the {nth} object from the left?", "What('s| is) the {nth} <thing> from the left(| in <picture>)?",
             "Which <thing> is the {nth} from the left?",
             "From the left, what is the {nth} <thing>?", "Name the {nth} <thing> from the left.")
NEXT_TO = ("What is {side} the {name}?", "What is {side} the {name}?", "What('s| is) {side} the {name}(| here| in <picture>)?",
           "(What|Which) (object|thing|item) is {side} the {name}?",
           "What do you see {side} the {name}?", "What can you see {side} the {name}?", "<ask> what is {side} the {name}?",
           "Name the <thing> {side} the {name}.", "What lies {side} the {name}?")
IS_NEXT_TO = ("{is} the {a} {side} the {b}?", "{is} the {a} {side} the {b}?",
              "{is} the {a} (placed |located |drawn |){side} the {b}(| in <picture>)?")
WHERE = ("Where is the {name}?", "Where is the {name}?", "Where in the picture is the {name}?", "Where do you see the {name}?",
         "Where('s| is) the {name}( located| placed|)( in <picture>|)?",
         "Where (can you see|can I find|can I see|do you find) the {name}?", "In (what|which) part of <picture> is the {name}?",
         "What is the (position|location|place) of the {name}?", "<ask> where the {name} is(| located)?",
         "(Locate|Find) the {name}.", "<polite> (locate|find) the {name}?",
         "(Position|Location) of the {name}?", "Whereabouts is the {name}?", "The {name}, where is it?")
WHERE_MANY = ("Where are the {name}?", "Where are the {name}?", "Where in <picture> are the {name}?",
              "Where (do|can) you see the {name}?", "<ask> where the {name} are?")
WHERE_IT = ("Where is it?", "Where in the picture is it?", "Where( in <picture>|) is (it|the object|the thing)?",
            "(What|Which) part of <picture> is it in?", "<ask> where it is?", "Where?")
TEXT_COLOUR = ("What <color> is the text?", "What <color> is the {kind}?",
               "(What|Which) <color> (is|has) the ({kind}|text|writing)?", "What is the <color> of the ({kind}|text|writing)?",
               "In (what|which) <color> is (it|the text|the {kind}) written?", "<ask> (what|which) <color> the (text|{kind}) is?")
TEXT_KIND = ("Is it a number or a word?", "Is the text a number or a word?",
             "Is (this|it|that) a (number or a word|word or a number)?", "Do you see a number or a word?",
             "<ask> if it is a number or a word?", "Does <picture> show a (number or a word|word or a number)?")
DIGITS = ("How many digits are there?", "How many digits does the number have?",
          "How many digits (do you see|has it|has the number|does it have|can you count)?", "Count the digits.")
LETTERS = ("How many letters are there?", "How many letters does the word have?",
           "How many letters (do you see|has it|has the word|does it have|can you count)?", "Count the letters.")
ANY_TEXT = ("Is there any text?", "Is there text in the picture?", "Do you see a text?", "Is there something written?",
            "Is there (any |some |)(text|writing)( in <picture>| here|)?",
            "(Do|Can) you see (any |)(text|writing)( in <picture>| here|)?", "Does <picture> (contain|have|show) (any |)text?",
            "Is (anything|something) written( here| there| in <picture>|)?")
EDIBLE = ("Can you eat it?", "Is it something to eat?", "Can (you|I|one|people) eat (it|this|that)?",
          "Is (this|it) (edible|something you can eat)?")
WHICH_PICTURE = ("Which picture has the {name}?", "Which picture shows the {name}?", "Which image has {a}?",
                 "In which picture is the {name}?",
                 "Where is the {name}, in the first or the second picture?",
                 "(Which|What) (picture|image|one) (has|shows|contains) (the {name}|{a})?",
                 "In (which|what) (picture|image) (is|do you see|can you see|can I find) (the {name}|{a})?",
                 "Which of the (two |)(pictures|images) (has|shows|contains) (the {name}|{a})?",
                 "Is the {name} in the first or (in |)the second (picture|image)?",
                 "<ask> which (picture|image) (has|shows) the {name}?", "(Find|Locate) the {name}: first or second picture?")
WHICH_PICTURE_KIND = ("Which picture has {a}?", "(Which|What) (picture|image|one) (has|shows|contains) {a}?",
                      "In which (picture|image) (is there|do you see|can you see) {a}?",
                      "Which of the (two |)(pictures|images) (has|shows|contains) {a}?")
ONE_OF_TWO = ("What is in the {nth} picture?", "What does the {nth} picture show?", "What is in the {nth} image?",
              "What('s| is) (in|on|shown in) the {nth} (picture|image|one)?",
              "What (do|can) you see in the {nth} (picture|image|one)?",
              "What does the {nth} (picture|image|one) (show|contain|depict)?", "<ask> what is in the {nth} (picture|image)?",
              "(Name|Identify) what is in the {nth} (picture|image).", "What is in (picture|image) {number}?",
              "What does (picture|image) {number} show?")
COUNT_IN_ONE = ("How many objects are in the {nth} picture?",
                "How many <things> (are|do you see|can you see) in the {nth} (picture|image)?",
                "How many <things> does the {nth} (picture|image) (show|have)?", "Count the <things> in the {nth} (picture|image).")
BACKGROUND_OF_ONE = ("What color is the background of the {nth} picture?", "What is the background color of the {nth} picture?",
                     "(What|Which) <color> is the background (of|in) the {nth} (picture|image)?",
                     "What background <color> does the {nth} (picture|image) have?")
BOTH = ("Do both pictures show {a}?", "Do both (pictures|images) (show|have|contain) {a}?",
        "Is there {a} in both (pictures|images)?", "Can you see {a} in both (pictures|images)?")
DESCRIBE_TWO = ("What do you see?", "What is in the pictures?", "Describe the pictures.",
                "Describe (both|the two|the|these) (pictures|images).",
                "What (do|can) you see in (the|these|both) (pictures|images)?",
                "What is (shown|in) (the|these|both) (pictures|images)?", "<polite> describe (both|the|these) (pictures|images)?",
                "What do the (pictures|images) show?")
UNKNOWABLE = (
    "What is the name of the person?", "What time is it?", "What day is it?", "Who took this picture?", "How old is the person?",
    "What is the price?", "Where was this photo taken?", "What is the weather like?", "What is the phone number?", "Who is this?",
    "What is the person wearing?", "How much does it cost?", "What is the person doing?", "When was this taken?",
    "Which city is this?",
    "What language is it?", "What does it smell like?", "Who made it?", "Who drew this?", "How old is it?", "What is its name?",
    "Who owns it?", "What year is it?", "How heavy is it?", "Where is the person?", "Which country is this?",
    "What sound does it make?",
    "What is the temperature?", "What is behind the wall?", "What happens next?", "What is he doing?", "What is she doing?",
    "Why is it there?", "What is the address?", "What is the email address?", "How many people are there?",
    "Who is in the picture?",
    "What is the date?", "How far away is it?", "What brand is it?", "What material is it made of?", "How tall is it?",
    "(Who|Which person) (is|could|might) (that|it|this|he|she)( be|)?",
    "(When|Where|Why) was (it|this|<picture>) (taken|made|drawn|painted|bought)?",
    "(Who|Which artist) (drew|painted|made|owns|bought|sold) (it|this|<picture>)?",
    "<ask> (who|how old) (this|he|she|it) is?",
    "<ask> (who made it|who drew this|where this was taken|how much it costs|what it costs|when it was made|its price)?",
    "How (old|heavy|tall|far away|expensive|fast|loud|warm|deep) (is|might|could) (it|this|that)( be|)?",
    "What( is|'s) (his|her|its|their|the person's) (name|age|job|address|price|weight|owner|history)?",
    "What (does|did|might|could) (it|this|he|she) (cost|weigh|smell like|taste like|think|say about you|want|feel)?",
    "(What|Which) (city|country|street|year|month|season|planet of birth) is (it|this|that)?",
    "What (happened|happens) (before|next|after this|then|here yesterday)?",
    "Why is (it|this|he|she) (there|here|so sad|so happy|like that)?", "Is (it|he|she) (happy|tired|old|rich|famous) and why?",
    "What is (he|she|the man|the woman|the child|the person) (doing|wearing|holding|saying|looking at|thinking)?",
    "<polite> (tell me the price|tell me who this is|name the person|name the artist|guess the price)?")
# Never drawn by `pick`: kind of question -> what the evaluation asks instead of a trained wording.
HELD_OUT = {
    "what": ("Tell me what you see.", "Could you name this for me?", "What might this be?", "What have we got here?",
             "Which thing is in the image?", "Say what it is."),
    "what_all": ("Run through the things you see.", "Give me a list of what is there.", "Which items appear?"),
    "describe": ("Put this picture into words.", "Sum up the image in one sentence.", "Let me have a short description."),
    "count": ("What's the total number of objects?", "How many separate things appear?", "Give me the object count."),
    "background": ("The background is which color?", "What color fills the background?", "What color surrounds it?"),
    "read": ("Spell it for me.", "What are the characters?", "Would you read out what stands there?"),
    "category": ("Which group does this fall into?", "What class of thing would this be?", "To which category does this belong?"),
}


def plain(text: str) -> str:
    """Letters, digits and single spaces only, lower case: two wordings that differ in nothing else are the same."""
    return " ".join(re.sub("[^a-z0-9 ]", "", text.lower()).split())


NEVER_TRAINED = frozenset(plain(text) for texts in HELD_OUT.values() for text in texts)


def resolve(pattern: str, rng: random.Random) -> str:
    """One wording of a pattern: fragments put in, then alternatives chosen from the innermost out, then digits."""
    pattern = re.sub("<([a-z]+)>", lambda m: FRAGMENTS[m[1]], pattern)
    while "(" in pattern:
        pattern = re.sub(r"\(([^()]*)\)", lambda m: rng.choice(m[1].split("|")), pattern)
    pattern = re.sub(r"\\d", lambda _m: str(rng.randrange(2, 10)), pattern)
    return pattern[0].upper() + pattern[1:]


def pick(rng: random.Random, patterns: tuple[str, ...], **words: str) -> str:
    """A random wording of the patterns, filled with words; never one that is held out."""
    while True:
        text = resolve(rng.choice(patterns), rng)
        if plain(text) not in NEVER_TRAINED:
            return text.format(**words)


def mistype(text: str, rng: random.Random) -> str:
    """Two letters of a longer word swapped, or one of them lost."""
    places = [m.start() for m in re.finditer("[a-z](?=[a-z][a-z])", text)]
    if not places:
        return text
    i = rng.choice(places)
    return text[:i] + text[i + 1] + (text[i] if rng.random() < 0.5 else "") + text[i + 2:]


def restyle(question: str, rng: random.Random) -> str:
    """The question as hurried or polite people type it."""
    k = rng.random()
    if k < 0.08:
        question = rng.choice(("Please: ", "Hi! ", "Hello, ", "Now ", "And ", "So, ", "OK. ", "Tell me: ", "Hey, ", "Quick question: ", "Well, ", "Then ")) + question
    elif k < 0.13 and question.endswith("?"):
        question = question[:-1] + rng.choice((" please?", ", please?", " in this picture?" if "picture" not in question else "??", ", do you know?", " exactly?"))
    if rng.random() < 0.25:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    if rng.random() < 0.1:
        question = question.replace("'", "")
    if rng.random() < 0.04:
        question = mistype(question, rng)
    return question
