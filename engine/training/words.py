"""Words that fill the gaps of self-made prompts."""

from __future__ import annotations


def _items(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in text.split("|"))


LISTS: dict[str, tuple[str, ...]] = {
    "ask": _items(
        """
        Tell me about | Explain | Describe | What should I know about | Give an overview of | What
        do you think about | Help me understand | Why do people care about | How did people come
        to rely on | List the advantages and drawbacks of | Teach me the basics of | Write an
        essay on
        """
    ),
    "write": _items(
        """
        Write a short story | Write a letter | Write a blog post | Write a speech | Write a news
        item | Write a description | Write a poem | Write a song | Write an introduction | Write a
        review | Write an outline | Write a dialogue | Write a report | Write a tweet
        """
    ),
    "topic": _items(
        """
        night trains | volcanoes | honey bees | public libraries | electric cars | chess | home
        gardening | coral reefs | the human heart | solar power | remote work | sourdough bread |
        jazz music | glaciers | school uniforms | space telescopes | street food | old bridges |
        river floods | sleep | robots | fair trade coffee | city parks | marathon running | video
        games | vaccines | wind turbines | migrating birds | paper money | social media |
        lighthouses | learning a language | tea | mountain rescue | black holes | deserts |
        photography | the printing press | dogs | fashion | recycling | nuclear energy |
        artificial intelligence | folk tales | opera | team sports | monsoons | whales | ancient
        Rome | the Silk Road | medieval castles | antibiotics | concrete | earthquakes | maps |
        bicycles | museums | early computers | stress | budgeting | friendship | leadership |
        forest fires | the moon | satellites | cheese | piano lessons | insurance | elections |
        the stock market | housing costs | drones | yoga | deep sea fish | penguins | theatre |
        radio | subways | clocks | perfume | salt
        """
    ),
    "science": _items(
        """
        photosynthesis | gravity | inflation | natural selection | osmosis | entropy | supply and
        demand | tides | lightning | magnetism | the water cycle | plate tectonics | radioactivity
        | compound interest | the greenhouse effect | neural networks | DNA replication | friction
        | evaporation | eclipses | chemical bonds | the immune system | probability | refraction |
        fermentation | quantum mechanics | enzymes | sound waves | climate | game theory
        """
    ),
    "event": _items(
        """
        the French Revolution | the fall of the Roman Empire | the Industrial Revolution | the
        Black Death | the Moon landing | the First World War | the invention of printing | the
        Great Depression | the Renaissance | the building of the railways | the Cold War | the age
        of exploration | the end of apartheid | the fall of the Berlin Wall | the American Civil
        War | the gold rush
        """
    ),
    "kind": _items(
        """
        story | letter | guide | speech | poem | article | script | summary | advertisement |
        fable
        """
    ),
    "audience": _items(
        """
        a ten-year-old | a busy manager | a class of beginners | your grandmother | new employees
        | a tourist | a curious teenager | a small business owner | a family with children | an
        expert | someone in a hurry | a team of engineers
        """
    ),
    "person": _items(
        """
        my manager | a customer | my landlord | a colleague | my teacher | an old friend | the
        city council | a job applicant | the support team | my neighbour | a supplier | the editor
        of a newspaper
        """
    ),
    "role": _items(
        """
        a ship's captain | a doctor | a chess coach | a detective | a travel guide | a history
        teacher | an astronaut | a chef | a lawyer | a pirate | a gardener | a career adviser | a
        physicist | a librarian | a radio host | a machine learning engineer | a fitness trainer |
        a shopkeeper | a king
        """
    ),
    "activity": _items(
        """
        public speaking | cooking | time management | swimming | drawing | negotiation | saving
        money | studying for exams | hiking | gardening | writing | team meetings | photography |
        chess | job interviews | a birthday party | a school fair | a rainy weekend
        """
    ),
    "language": _items(
        """
        Python | JavaScript | Java | C++ | C | Rust | Go | SQL | Bash | HTML
        """
    ),
    "algorithm": _items(
        """
        binary search | merge sort | a hash table | depth-first search | a linked list | dynamic
        programming | the sieve of Eratosthenes | quicksort | a priority queue | Dijkstra's
        algorithm | a binary tree | string reversal | the greatest common divisor | a web server
        """
    ),
    "dish": _items(
        """
        lentil soup | apple pie | vegetable curry | pancakes | pasta with mushrooms | potato salad
        | fish tacos | banana bread | fried rice | tomato sauce | chicken stew | chocolate cake
        """
    ),
    "country": _items(
        """
        Australia | Brazil | Canada | Denmark | Egypt | France | Germany | Greece | India |
        Indonesia | Iran | Ireland | Italy | Japan | Kenya | Mexico | Morocco | Nigeria | Norway |
        Pakistan | Peru | Poland | Portugal | South Africa | South Korea | Spain | Sweden |
        Switzerland | Thailand | Turkey | the United States | Vietnam | China | Russia | Argentina
        | Chile
        """
    ),
    "place": _items(
        """
        London | Lisbon | Chicago | Nairobi | Mumbai | Sydney | Toronto | Berlin | Cairo | Lima |
        Osaka | Boston | Texas | California | Manchester | Paris | Rome | Seattle | Florida |
        Georgia | Liverpool | Dublin | Madrid | New York | Glasgow | Vienna | Seoul | Brussels
        """
    ),
    "name": _items(
        """
        Anna | Ben | Carla | David | Elena | Farid | Grace | Henry | Ivy | James | Kate | Liam |
        Maria | Noah | Olivia | Paul | Rosa | Sam | Tina | Victor | Wendy | Yusuf | Zoe | Emma |
        Jack | Lucy | Mark | Nina | Oscar | Peter | Sarah | Tom
        """
    ),
    "surname": _items(
        """
        Adams | Baker | Carter | Davies | Evans | Foster | Garcia | Hughes | Ivanov | Johnson |
        Khan | Lopez | Miller | Nguyen | Owen | Patel | Quinn | Roberts | Silva | Taylor | Usman |
        Walker | Young | Zimmer
        """
    ),
    "item": _items(
        """
        apples | cookies | pencils | books | tickets | stamps | marbles | eggs | bottles |
        balloons | cupcakes | cards | oranges | flowers | toys | shirts | stickers | candles
        """
    ),
    "animal": _items(
        """
        cows | sheep | hens | goats | horses | ducks | pigs | rabbits
        """
    ),
    "number": _items(
        """
        8 | 9 | 10 | 12 | 14 | 15 | 16 | 18 | 20 | 24 | 25 | 30 | 36 | 40 | 48 | 50
        """
    ),
    "number2": _items(
        """
        2 | 3 | 4 | 5 | 6 | 7 | 8 | 9
        """
    ),
    "big": _items(
        """
        60 | 72 | 80 | 96 | 100 | 120 | 150 | 180 | 200 | 240 | 300 | 360 | 500
        """
    ),
    "time": _items(
        """
        One winter morning | Long ago | At midnight | On the last day of school | After the storm
        | Every Sunday | In the year 2150 | On a quiet street | Early in the spring
        """
    ),
    "news": _items(
        """
        A man from {place} has been arrested after | Police in {place} said on {day} that | A
        family in {place} was left | The government of {country} has announced | Scientists in
        {country} have found that | {name} {surname}, {number} years old, was | The {place} team
        won | A new study by researchers in {place} suggests that | Hundreds of people in {place}
        have | The mayor of {place} told reporters that | A court in {place} ruled on {day} that |
        {name} {surname} scored twice as | A mother of {number2} from {place} | The company said
        on {day} that it would | Officials in {country} are looking for | More than {big}
        passengers were | A fire broke out in {place} on {day} | Former champion {name} {surname}
        has | President {surname} met with | A video shows the moment | Doctors at a hospital in
        {place} | It has been {number} years since | Pupils at a school in {place} | The film,
        directed by {name} {surname}, | Heavy rain in {country} has
        """
    ),
    "day": _items(
        """
        Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday
        """
    ),
    "q": _items(
        """
        Who | When | Where | What | Which | How many | Who is | Who was | When was | When did |
        Where is | What is | What year | How did | Why did | Who wrote | Who plays | What is the
        name of
        """
    ),
    "qverb": _items(
        """
        wrote | won | sang | founded | played | discovered | invented | directed | painted | is |
        was | owns | produces | built | has the most | became | sings | voices | designed | ruled
        """
    ),
    "qkind": _items(
        """
        country | city | river | song | film | book | team | planet | king | language | mountain |
        state | actor | company | animal | island | president | parts | types
        """
    ),
    "thing": _items(
        """
        the Great Wall of China | the Suez Canal | the Eiffel Tower | the first Olympic Games |
        the Amazon river | the United Nations | the Nobel Prize | the World Cup | the Bible | the
        Constitution | the Titanic | Harry Potter | the Super Bowl | the Declaration of
        Independence | the Taj Mahal | Star Wars | Mount Everest | the Mona Lisa | the Berlin Wall
        | the Sahara desert | the stock exchange | the national anthem | the heart | the Grand
        Canyon | the Premier League | the Hubble telescope | the Ottoman Empire | the Nile | the
        railway | the BBC | the Supreme Court | the Pacific Ocean
        """
    ),
    "invention": _items(
        """
        the telephone | the light bulb | the steam engine | the airplane | the radio | the
        microscope | dynamite | the World Wide Web | the thermometer | the battery | paper | the
        compass | penicillin
        """
    ),
    "tongue": _items(
        """
        French | German | Spanish | Italian | Portuguese
        """
    ),
    "de_time": _items(
        """
        Gestern | Am Montag | Vor zwei Jahren | In der vergangenen Woche | Nach Angaben der
        Polizei | Nach dem Spiel | Zum ersten Mal | Im Sommer | Seit dem Krieg | Wegen des
        schlechten Wetters | Trotz der Kritik | Am frühen Morgen | Im vergangenen Jahr | Auf der
        Konferenz | Nach langen Verhandlungen | Ohne weitere Erklärung | Wie erwartet | Bereits
        2010 | Kurz vor Mitternacht | Heute
        """
    ),
    "de_clause": _items(
        """
        hat die Stadt ihren neuen Haushalt | hat der Minister seine Pläne | haben die Arbeiter
        eine Lösung | hat das Unternehmen seine Zahlen | haben Forscher eine neue Methode | hat
        die Familie ihr altes Haus | hat der Präsident das Gesetz | haben viele Menschen ihre
        Arbeit | hat der Verein einen jungen Spieler | hat die Lehrerin ihre Schüler | hat das
        Gericht den Fall | haben die Bürger den Vorschlag | hat die Bank ihre Kunden | hat der
        Autor sein neues Buch | hat die Regierung die Steuern | haben die Vereinten Nationen ihre
        Hilfe | hat der Trainer die Mannschaft | hat die Kommission den Bericht
        """
    ),
    "de_place": _items(
        """
        in Berlin vorgestellt | in Hamburg angekündigt | auf dem Marktplatz gezeigt | in ganz
        Europa verloren | im Parlament verteidigt | ohne Erfolg gesucht | mit großer Freude
        begrüßt | am Ende doch gefunden | in München verlassen | noch einmal geprüft | zum zweiten
        Mal abgelehnt | öffentlich kritisiert | vor Gericht gebracht | gegen den Willen der
        Opposition geändert | mit sofortiger Wirkung beendet | in der Zeitung beschrieben | nicht
        mehr unterstützt
        """
    ),
    "de_end": _items(
        """
        . | , weil es keine andere Möglichkeit gab . | , obwohl die Kosten gestiegen sind . | , um
        mehr Zeit zu gewinnen . | , sagte ein Sprecher . | , und niemand war überrascht . | ,
        während andere noch warten mussten . | , damit die Kinder sicher zur Schule kommen . | ,
        was zu neuen Fragen führte . | , bevor der Winter begann . | , aber die Zukunft bleibt
        offen .
        """
    ),
    "de_said": _items(
        """
        Er sagte | Sie erklärte | Die Polizei teilte mit | Experten glauben | Der Arzt meint |
        Viele hoffen | Die Zeitung berichtet | Ich weiß | Wir haben erfahren | Der Bürgermeister
        betonte | Es ist klar | Niemand glaubt | Die Studie zeigt | Mein Vater dachte immer | Es
        heißt
        """
    ),
    "de_that": _items(
        """
        dass die Preise in diesem Jahr weiter steigen | dass der Zug nicht mehr fährt | dass die
        Kinder gut lernen | dass das Wasser nicht sauber ist | dass die Wahl im Herbst stattfindet
        | dass es keine einfache Antwort gibt | dass die neue Brücke sicher ist | dass der Film
        ein großer Erfolg wird | dass viele junge Leute das Land verlassen | dass die Wirtschaft
        sich nur langsam erholt | dass er die Wahrheit kennt | dass sie bald nach Hause kommen |
        dass die Maschine mehr Strom braucht | dass das Museum im Winter geschlossen bleibt | dass
        ein Fehler gemacht wurde
        """
    ),
    "de_short": _items(
        """
        Das ist keine gute Idee . | Wir müssen jetzt gehen . | Der Zug kommt um acht Uhr an . |
        Ich habe meinen Schlüssel verloren . | Die Katze schläft auf dem Sofa . | Wer hat das
        Fenster geöffnet ? | Morgen wird es regnen . | Er liest jeden Abend ein Buch . | Das Essen
        war sehr gut . | Die Suche nach den Vermissten geht weiter . | Die Feuerwehr löschte den
        Brand schnell . | Sie wartet seit einer Stunde auf den Bus . | Der Vertrag endet im März .
        """
    ),
    "de_open": _items(
        """
        Der | Die | Das | Ein | Eine | Nach | Wir | Es gibt | In Deutschland | Die Regierung | Der
        Präsident | Viele | Für die | Mit dem | Seit | Im Jahr | Man kann | Ich | Sie haben | Er
        hat | Bei der | Unter | Auch die
        """
    ),
    "fr_open": _items(
        """
        Le | La | Les | Nous | Il y a | Dans la ville | Le gouvernement | Une | Pour les | Je |
        Elle a | Depuis
        """
    ),
    "es_open": _items(
        """
        El | La | Los | Nosotros | Hay | En la ciudad | El gobierno | Una | Para | Yo | Desde
        """
    ),
    "en_open": _items(
        """
        The train | I would like | We have | My sister | The weather | In the morning | She said
        that | There is | If you want | The new law | They decided | Please | The children | A
        friend of mine | After
        """
    ),
}
"""What `{name}` stands for. `name2`, `name3`, `topic_c` and the like are derived from these."""
