"""Wordings: how people ask the same thing in many ways, and what the model says without looking."""
import random

WHAT = ("What is in the picture?", "What is this?", "What do you see?", "What can you see in the image?", "What's in this image?",
        "What is shown here?", "Name the object in the picture.", "What does the picture show?", "What do you see in this picture?",
        "Tell me what this is.", "What is it?", "What is shown in the image?", "Can you tell me what is in the picture?",
        "What's this?", "What is that?", "What can you see?", "What do you see here?", "What is in this picture?", "Name it.",
        "Identify the object.", "What object is this?", "Which object is shown?", "What am I looking at?", "What's in the picture?")
WHAT_ALL = WHAT[:5] + ("What is shown here?", "What does the picture show?", "What do you see in this picture?",
                       "What is shown in the image?", "What can you see?", "What's in the picture?", "What is in this picture?",
                       "Name everything you see.", "List the objects.", "What objects are in the picture?", "Name all the things.",
                       "What things do you see?", "List everything in the picture.", "Which objects do you see?")
DESCRIBE = ("Describe the picture.", "Describe the image.", "Describe this picture.", "Describe this image.",
            "Please describe what you see.", "Give a short description of the image.", "Write a caption for this picture.",
            "Caption this image.", "Describe this image in one sentence.", "Describe it.", "Can you describe this picture?",
            "Describe what you see.", "Give me a description.")
READ = ("What does it say?", "What is written in the picture?", "Read the text.", "What does the text say?", "What text is shown?",
        "Please read what is written here.", "What is written here?", "Which text do you see?", "Read this.", "Read it.",
        "What is the text?", "What's written here?", "Can you read this?", "What does the picture say?")
READ_NUMBER = ("What number is shown?", "What number is this?", "Which number do you see?", "Read the number.",
               "What is the number?", "What number do you see?")
READ_WORD = ("What word is shown?", "What word is this?", "Which word do you see?", "Read the word.", "What is the word?",
             "What word do you see?")
BACKGROUND = ("What color is the background?", "What colour is the background?", "Which color is the background?",
              "What is the background color?", "What is the color of the background?", "Background color?",
              "What color is behind it?")
COUNT = ("How many objects are there?", "How many things are there?", "How many objects do you see?", "Count the objects.",
         "How many things do you see?", "How many objects are in the picture?", "How many?", "How many things are in the image?",
         "How many items are there?", "How many are there?")
COUNT_SHAPES = ("How many shapes are there?", "How many shapes do you see?", "How many shapes are in the picture?", "Count the shapes.")
CATEGORY = ("What kind of thing is it?", "What kind of thing is this?", "What category does it belong to?", "What type of thing is shown?",
            "What kind of object is this?", "Which category is it?", "What sort of thing is it?")
UNKNOWABLE = (
    "What is the name of the person?", "What time is it?", "What day is it?", "Who took this picture?", "How old is the person?",
    "What is the price?", "Where was this photo taken?", "What is the weather like?", "What is the phone number?", "Who is this?",
    "What is the person wearing?", "How much does it cost?", "What is the person doing?", "When was this taken?", "Which city is this?",
    "What language is it?", "What does it smell like?", "Who made it?", "Who drew this?", "How old is it?", "What is its name?",
    "Who owns it?", "What year is it?", "How heavy is it?", "Where is the person?", "Which country is this?", "What sound does it make?",
    "What is the temperature?", "What is behind the wall?", "What happens next?", "What is he doing?", "What is she doing?",
    "Why is it there?", "What is the address?", "What is the email address?", "How many people are there?", "Who is in the picture?",
    "What is the date?", "How far away is it?", "What brand is it?", "What material is it made of?", "How tall is it?",
)
IDENTITY = ("I am the Diptych demo model. I can name pictograms, shapes, colors, counts and positions, and read short words and "
            "numbers. Photographs are beyond me.")
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey there!", "Hello there!", "Good morning!", "Good evening!", "Hi there", "Greetings!"),
     "Hello! Show me a simple picture and ask me about it."),
    (("How are you?", "How are you doing?", "Hi, how are you?", "Hello, how are you?", "How's it going?", "What's up?", "Are you well?"),
     "I am fine, thank you. Show me a simple picture."),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "What model are you?", "Introduce yourself.",
      "Which model is this?", "Are you ChatGPT?", "Are you a human?", "Are you a robot?", "Who made you?", "What's your name?"), IDENTITY),
    (("What can you do?", "Help", "Help me", "How can you help me?", "What can I ask you?", "What do you know?", "How do you work?",
      "What can you see?", "What kind of pictures can you see?", "What questions can you answer?", "What should I ask?"),
     "I can name pictograms, shapes, colors, counts and positions, and read short words and numbers. Photographs are beyond me."),
    (("Can you see photos?", "Can you describe photographs?", "Do you understand photos?", "Can you look at a photo?",
      "Can I send you a photo?", "Do photographs work?", "Can you recognize people?", "Can you read documents?"),
     "No, photographs and documents are beyond me. I see pictograms, shapes, short words and numbers."),
    (("Thank you", "Thank you!", "Thanks", "Thanks!", "Thanks a lot!", "Great, thanks!", "Cool, thank you!", "Nice, thanks."),
     "You are welcome!"),
    (("Bye", "Goodbye!", "See you!", "Bye bye!", "Good night!", "See you later."), "Goodbye!"),
    (("Good job!", "Well done!", "Correct!", "That is right.", "Very good!", "Nice!", "Great!", "Amazing!", "You are smart."), "Thank you!"),
    (("That is wrong.", "No, that is not right.", "Wrong!", "You are wrong.", "Incorrect.", "That's not correct."),
     "I am sorry. I am a very small model and I make mistakes."),
    (("What is the capital of France?", "Who wrote Hamlet?", "Write a poem.", "Write a Python function.", "What is the meaning of life?",
      "Explain quantum physics.", "Translate hello to Spanish.", "What is 7 times 6?", "Tell me a joke.", "Give me a recipe.",
      "What is the tallest mountain?", "Who is the president?", "Tell me a story.", "What is photosynthesis?", "Summarize this text.",
      "What is the weather today?", "Write an email.", "What is the square root of 16?", "How far is the moon?", "Sing a song.",
      "What is machine learning?", "Who won the game?", "How do I cook rice?", "What is the speed of light?", "Write a haiku about the sea."),
     "I don't know. I only answer questions about simple pictures."),
)
NO_PICTURE = "I don't see a picture. Please add one."
SYSTEMS = ("You are a helpful assistant.", "Answer questions about the picture.", "Answer briefly.", "You are a vision assistant.",
           "You are a helpful AI assistant. Be concise.", "Reply in English.")


def restyle(question: str, rng: random.Random) -> str:
    """The question as hurried or polite people type it."""
    k = rng.random()
    if k < 0.06:
        question = rng.choice(("Please: ", "Hi! ", "Hello, ", "Now ", "And ", "So, ", "OK. ", "Tell me: ")) + question
    elif k < 0.1 and question.endswith("?"):
        question = question[:-1] + rng.choice((" please?", ", please?", " in this picture?" if "picture" not in question else "??"))
    if rng.random() < 0.25:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    return question
