# SPDX-License-Identifier: Apache-2.0
"""Word lists and templates behind :mod:`dspark.training.prompts`, split into train and held out."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in text.split(",") if word.strip())


def _lines(text: str) -> tuple[str, ...]:
    return tuple(" ".join(line.split()) for line in text.strip().splitlines())


NAMES = {
    "train": _words("""Anna, Ben, Carla, David, Emma, Frank, Grace, Henry, Ivy, Jack, Kara,
        Liam, Maria, Noah, Olga, Peter, Rosa, Sam, Tina, Victor, Wendy, Yusuf, Zoe, Mei, Ravi,
        Lena"""),
    "heldout": _words("Arthur, Bella, Chen, Dora, Elias, Fatima, Georg, Hana"),
}

THINGS = {
    "train": _words("""apples, books, marbles, stickers, pencils, cookies, coins, stamps,
        oranges, flowers, toy cars, shells, balloons, cards, eggs, bottles, tickets, candies,
        beads, chairs, muffins, buttons, bricks, photos"""),
    "heldout": _words("lemons, magnets, postcards, ribbons, walnuts, lanterns"),
}

MATH = {
    "train": _lines("""
        {name} has {a} {thing} and buys {b} more. Then {name} gives {c} of them to {other}. How \
          many {thing} does {name} have now?
        {name} has {ac} {thing} and puts them into {c} equal boxes. How many {thing} are in each \
          box?
        A box holds {a} {thing}. How many {thing} are in {c} boxes, if {d} of them are broken?
        {name} walks {c} miles every day for {b} days and then {a} miles on the last day. How \
          many miles is that in total?
        {name} earns ${a} an hour and works {c} hours a day for {d} days. How much money does \
          {name} earn?
        A book costs ${a} and a pen costs ${c}. How much do {c} books and {b} pens cost?
        {name} is {a} years old. {other} is {c} years older than {name}. What is the sum of their \
          ages?
        {name} is {a} years old and {other} is {c} times as old. How old will {other} be in {d} \
          years?
        A train travels at {round} miles per hour for {c} hours. How far does it go?
        A shop sells {a} {thing} on Monday, {b} on Tuesday and {c} times as many as on Monday on \
          Wednesday. How many {thing} does it sell in total?
        {name} reads {a} pages a day. How many pages does {name} read in {d} weeks?
        A recipe needs {c} cups of flour for {d} muffins. How many cups are needed for {b} times \
          as many muffins?
        A shirt costs ${round}. It is sold at a discount of {percent}%. What is the price after \
          the discount?
        What is {percent}% of {round}?
        There are {abc} students in {c} equal groups. How many students are in each group?
        {name} saves ${b} every week. How many weeks does it take to save ${round}?
        A garden is {a} meters long and {b} meters wide. What is its area and its perimeter?
        A square has sides of {a} centimeters. What is its area?
        Solve for x: {c}x + {b} = {round}.
        Solve for x: {d}x - {a} = {b}.
        Calculate {a} + {b} * {c}.
        Calculate ({a} + {b}) * {c} - {d}.
        What is {ac} divided by {c}?
        What is the average of {a}, {b} and {c}?
        {name} had ${round}. {name} spent ${a} on food and ${b} on a toy. How much money is left?
        {name} and {other} share {abc} {thing} equally. How many does each of them get?
        A bus has {a} passengers. At the first stop {c} get off and {d} get on. How many \
          passengers are on the bus now?
        A factory makes {round} {thing} per hour. How many does it make in {c} days of {d} hours?
        What is the least common multiple of {c} and {d}?
        What is the greatest common divisor of {ac} and {a}?
        Simplify the expression {c}x + {d}x - {b}.
        If y = {c}x + {d}, what is y when x = {b}?
        {name} buys {c} packs of {thing} for ${d} each and pays with a ${round} bill. How much \
          change does {name} get?
        A tank holds {round} liters. It is filled at {c} liters per minute. How long does it take \
          to fill it?
        {name} runs {c} kilometers in {d} minutes. How long does {name} need for {b} kilometers \
          at the same speed?
        """),
    "heldout": _lines("""
        {name} collected {a} {thing} in spring and twice as many in summer, but lost {c}. How \
          many {thing} are left?
        A farmer packs {b} {thing} into every crate and fills {d} crates. {other} takes {c} \
          crates. How many {thing} remain?
        A ticket costs ${a} for adults and ${c} for children. What do {d} adults and {c} children \
          pay together?
        A rope of {round} meters is cut into pieces of {c} meters. How many pieces are there?
        Find the value of x if x / {c} = {d} + {b}.
        Compute {a} * {c} + {b} * {d}.
        A car uses {c} liters of fuel for 100 kilometers. How much does it use for {round} \
          kilometers?
        """),
}

MATH_ENDINGS = {
    "train": (
        "", "", "Show your work.", "Explain step by step.", "Think step by step.",
        "Give the final answer on the last line.", "Explain your reasoning.", "Show each step.",
    ),
    "heldout": ("", "Reason step by step.", "Write down the calculation."),
}  # fmt: skip

CODE_TASKS = {
    "train": _words("""adds two numbers, computes the factorial of a number, checks if a number
        is prime, reverses a list, reverses a string, counts the vowels in a string, finds the
        maximum of a list, finds the minimum of a list, sorts a list of tuples by the second
        element, merges two dictionaries, computes the first n Fibonacci numbers, removes
        duplicates from a list, flattens a nested list, counts the words in a text, reads a
        file and returns its lines, converts Celsius to Fahrenheit, computes the greatest
        common divisor of two numbers, finds the second largest element of a list, rotates a
        list by k places, transposes a matrix, computes the sum of the digits of a number,
        validates an email address, generates a random password, performs a binary search,
        sorts a list with bubble sort, sorts a list with quick sort, computes the mean and the
        median of a list, finds the common elements of two lists, capitalizes each word of a
        string, checks whether two strings are anagrams, counts how often each character occurs
        in a string, returns the even numbers of a list, returns the squares of a list of
        numbers, checks if a year is a leap year, converts a decimal number to binary, computes
        the power of a number, finds all prime numbers below n, splits a list into chunks of
        size n, finds the longest word in a sentence, removes the spaces from a string,
        replaces every vowel with a star, multiplies two matrices, computes the area of a
        circle, computes the dot product of two vectors, checks if a list is sorted, finds the
        index of an element in a list, swaps two variables, prints the multiplication table of
        a number, converts a string to an integer, joins a list of strings with commas, counts
        the lines of a file, writes a list to a file, reads a CSV file, parses a JSON string,
        finds the missing number in a list, computes the distance between two points, checks if
        a string contains only digits, removes a key from a dictionary, inverts a dictionary,
        sorts a dictionary by its values, groups words by their first letter, computes the sum
        of all odd numbers in a list, finds the length of a linked list, inserts a node into a
        binary search tree, checks if parentheses are balanced, computes the compound interest,
        converts a list of tuples to a dictionary, zips two lists into a dictionary, returns
        the last element of a list, counts the negative numbers in a list, doubles every number
        in a list, filters the strings longer than n, removes the first occurrence of a value,
        generates a list of random integers, calculates the body mass index, converts hours to
        seconds, finds the difference of two sets, prints a triangle of stars, checks whether a
        number is a perfect square"""),
    "heldout": _words("""checks if a string is a palindrome, finds the union of two lists,
        moves all zeros of a list to the end, counts the consonants in a word, converts miles
        to kilometers, finds the shortest string in a list, sorts a list with insertion sort,
        computes the cumulative sum of a list, checks if a number is divisible by three,
        returns the n largest numbers of a list, removes punctuation from a text, computes the
        volume of a sphere"""),
}

CODE_TEMPLATES = {
    "train": _lines("""
        Write a Python function that {task}.
        Write a Python function that {task}. Include a short example.
        Write a Python function that {task} and explain how it works.
        Write a short Python program that {task}.
        I need a Python function that {task}. Can you help me?
        Implement a function in Python which {task}. Add a docstring.
        Write a JavaScript function that {task}.
        Give me Python code that {task}, with comments.
        Explain how you would write a function that {task}.
        Write a Python function that {task} and a test for it.
        Write a simple Python function that {task}, without any library.
        Write a Python function with type hints that {task}.
        How do I write a Python function that {task}?
        Complete this task in Python: write a function that {task}.
        Write a Java method that {task}.
        Write a C function that {task}.
        Write a function in any programming language that {task}.
        Can you show me Python code that {task}?
        Write a Python class with a method that {task}.
        Write a Python script that {task} and prints the result.
        """),
    "heldout": _lines("""
        Please write Python code: a function that {task}.
        Show me a simple Python function which {task} and describe each line.
        Create a Python function that {task}. Handle empty input.
        As a beginner in Python I want code that {task}. What does it look like?
        Solve this exercise: define a function that {task}.
        Return only code: a Python function that {task}.
        """),
}

CHAT_TOPICS = {
    "train": _words("""photosynthesis, gravity, the water cycle, volcanoes, the Roman Empire,
        the French Revolution, the printing press, electricity, rainbows, earthquakes, bees,
        whales, penguins, the moon, black holes, the immune system, vaccines, the human heart,
        sleep, dreams, memory, music, jazz, painting, photography, football, swimming, yoga,
        meditation, cooking pasta, baking bread, coffee, chocolate, gardening, composting,
        recycling, solar panels, wind turbines, electric cars, bicycles, trains, airplanes,
        computers, the internet, search engines, encryption, databases, operating systems,
        algorithms, machine learning, robots, budgeting, saving money, inflation, supply and
        demand, democracy, constitutions, human rights, climate change, coral reefs,
        rainforests, deserts, glaciers, the ocean, time zones, calendars, languages, poetry,
        short stories, public speaking, job interviews, teamwork, leadership, time management,
        study habits, note taking, writing essays, friendship, parenting, dogs, cats, horses,
        dinosaurs, fossils, atoms, molecules, metals, plastics, glass, bridges, skyscrapers,
        castles, the pyramids, museums, libraries, healthy eating, vegetables, exercise,
        stress, learning a new language, traveling by train, camping, hiking, the solar system,
        Mars, stars, the speed of light, the Renaissance, ancient Greece, the Silk Road, the
        Industrial Revolution, the Great Wall of China, Shakespeare, opera, dance, chess, board
        games, video games, social media, privacy, online shopping, small businesses,
        marketing, customer service, remote work, meetings, project management, open source
        software, programming, spreadsheets, statistics, geometry, fractions, DNA, evolution,
        cells, bacteria, viruses, birds, butterflies, spiders, sharks, elephants, wolves,
        trees, mushrooms, rice, cheese, soup, breakfast, birthdays, weddings, holidays, the
        weather, hurricanes, rivers, mountains, islands, maps, ships, firefighters, doctors,
        teachers, farmers"""),
    "heldout": _words("""magnets, tea, 3D printing, owls, the Vikings, origami, tides, honey,
        lighthouses, volunteering, email etiquette, acids and bases, kites, the ozone layer,
        tax returns, sculpture, knitting, dolphins, paper, city parks, sign language, comets"""),
}

CHAT_TEMPLATES = {
    "train": _lines("""
        Explain {topic} to a ten year old.
        Give me five interesting facts about {topic}.
        Write a short paragraph about {topic}.
        What are the main benefits of {topic}?
        Why is {topic} important? Answer in three sentences.
        Write a short story that involves {topic}.
        List the steps a beginner should take to learn about {topic}.
        Write a friendly email to a colleague about {topic}.
        Summarize what everyone should know about {topic}.
        What is {topic}?
        Tell me about {topic}.
        How would you describe {topic} to someone who has never heard of it?
        What are some common questions people ask about {topic}?
        Write a short poem about {topic}.
        Write an introduction for a blog post about {topic}.
        Give three reasons to be interested in {topic}.
        Compare the past and the future of {topic}.
        What should I read if I want to know more about {topic}?
        Write a dialogue between two friends about {topic}.
        Make a list of ten words related to {topic}.
        Can you give me some tips about {topic}?
        What are the advantages and disadvantages of {topic}?
        Write a quiz with three questions about {topic}.
        """),
    "heldout": _lines("""
        What is a common misconception about {topic}?
        Describe the history of {topic} in a few sentences.
        Write a speech of one minute about {topic}.
        How does {topic} affect our daily life?
        Give a short lesson plan about {topic} for school children.
        """),
}
