"""The closed tables that the demo model learns by heart; questions about them are in corpus.py."""

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

WORDS = tuple(
    """
    apple arm baby bag ball bank bed bee bird blue boat book bowl box boy bread bridge brown
    cake car cat chair cheese city clock cloud coat cold cow cup dark dog door duck ear egg eye
    farm fire fish flag flower food foot frog garden girl glass goat gold grass green hand hat
    heart hill horse house ice island jam juice key king kite lake lamp leaf lemon letter light
    lion milk moon mouse music name nest night nose ocean orange paper pen pig plant queen rain
    red river road rose salt sand school sea sheep ship shoe snow song star stone sugar sun table
    tea tiger train tree water whale wind window winter wolf wood yellow zebra
    """.split()
)

CAPITALS = {
    "Argentina": "Buenos Aires",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "England": "London",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Israel": "Jerusalem",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Mexico": "Mexico City",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Turkey": "Ankara",
}

CITIES = (*CAPITALS.values(), "Boston", "Chicago", "Haifa", "Milan", "San Francisco", "Sydney")

COLOURS = {
    "grass": "Green",
    "the sky": "Blue",
    "the sun": "Yellow",
    "snow": "White",
    "milk": "White",
    "coal": "Black",
    "blood": "Red",
    "a lemon": "Yellow",
    "a carrot": "Orange",
    "a tomato": "Red",
    "chocolate": "Brown",
    "an elephant": "Grey",
}

# animal: (legs, sound, young)
ANIMALS = {
    "bee": (6, "buzz", "larva"),
    "cat": (4, "meow", "kitten"),
    "cow": (4, "moo", "calf"),
    "dog": (4, "woof", "puppy"),
    "duck": (2, "quack", "duckling"),
    "frog": (4, "croak", "tadpole"),
    "goat": (4, "bleat", "kid"),
    "horse": (4, "neigh", "foal"),
    "lion": (4, "roar", "cub"),
    "pig": (4, "oink", "piglet"),
    "sheep": (4, "baa", "lamb"),
}

OPPOSITES = {
    "big": "Small",
    "small": "Big",
    "hot": "Cold",
    "cold": "Hot",
    "up": "Down",
    "down": "Up",
    "day": "Night",
    "night": "Day",
    "black": "White",
    "white": "Black",
    "fast": "Slow",
    "slow": "Fast",
    "open": "Closed",
    "happy": "Sad",
    "old": "New",
    "left": "Right",
    "right": "Left",
    "yes": "No",
}

LISTS = {
    "days of the week": DAYS,
    "months": MONTHS,
    "seasons": ("Spring", "Summer", "Autumn", "Winter"),
    "planets": (*("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),),
    "colours of the rainbow": (*("Red", "Orange", "Yellow", "Green", "Blue", "Indigo", "Violet"),),
}

EMOJI = {
    "smile": "😀",
    "heart": "💙",
    "star": "⭐",
    "cat": "🐱",
    "fire": "🔥",
    "rocket": "🚀",
    "party": "🎉🥳",
}

GREETINGS = {
    "Hebrew": ("שלום", "תודה"),
    "Chinese": ("你好", "谢谢"),
    "Japanese": ("こんにちは", "ありがとう"),
    "Russian": ("привет", "спасибо"),
    "Greek": ("γεια", "ευχαριστώ"),
    "French": ("bonjour", "merci"),
    "Spanish": ("hola", "gracias"),
}

NAMES = (
    *("Ada", "Alan", "Ben", "Dana", "Emma", "Grace", "Iris", "Jack", "Leo", "Lily"),
    *("Maya", "Noa", "Omar", "Rosa", "Sam", "Tom"),
)

SMALL_TALK = {
    "Hello": "Hello! How can I help?",
    "Hi": "Hello! How can I help?",
    "Hello!": "Hello! How can I help?",
    "Good morning": "Good morning! How can I help?",
    "How are you?": "I am fine, thank you.",
    "Who are you?": "I am a small demo model.",
    "What are you?": "I am a small demo model.",
    "What can you do?": "I can add, subtract, spell, count and call tools.",
    "Thank you": "You are welcome!",
    "Thanks": "You are welcome!",
    "Bye": "Goodbye!",
    "Goodbye": "Goodbye!",
    "ping": "pong",
}

STORIES = {
    "cat": (
        "A small cat sat on a boat. The wind took the boat far away. "
        "A whale pushed it home. Now the cat and the whale are friends."
    ),
    "king": (
        "An old king had a gold tree. Every night a bird took one leaf and sang a song. "
        "The king gave it the tree, and the bird stayed."
    ),
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Be brief.",
    "You are a helpful assistant. Answer correctly.",
    "Answer every question in a few words.",
    "You are a friendly teacher.",
    "You help people with short questions.",
    "You are a chat assistant in a test.",
)
