"""Two tokenizers on one text: pairs of positions, shared tokens."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from transformers import PreTrainedTokenizerFast

from hf_nanguard.examples.tasks.calendar_words import BAD_WORD, DAYS, MONTHS, PIECES, WORDS, build_tokenizers
from hf_nanguard.examples.tasks.token_alignment import align_positions, name_tokens, share_vocabulary


@pytest.fixture(scope="module")
def tokenizers():
    return build_tokenizers()


def spans(tokenizer, text):
    return tokenizer(text, return_offsets_mapping=True)["offset_mapping"]


def test_pairs_predict_the_same_characters(tokenizers):
    student, teacher = tokenizers
    text = "after august come september october wednesday thursday"
    ours, theirs = spans(student, text), spans(teacher, text)
    places = align_positions(ours, theirs)
    assert len(places) == len(ours)
    predicted = {text[slice(*ours[i + 1])] for i, place in enumerate(places) if place >= 0}
    assert predicted == {"august", "come", "october", "thursday"}
    assert all(ours[i + 1] == theirs[place + 1] for i, place in enumerate(places) if place >= 0)


def test_padding_and_special_tokens_have_no_pair():
    assert align_positions([(0, 3), (0, 0), (0, 0)], [(0, 0), (0, 3), (0, 0)]) == [-1, -1, -1]


def test_the_first_token_of_the_teacher_predicts_nothing_it_has_read():
    # the student predicts (0, 3) at its first position, the teacher begins with it
    assert align_positions([(0, 0), (0, 3), (4, 5)], [(0, 3), (4, 5)]) == [-1, 0, -1]


def test_shared_tokens_have_the_same_text_and_no_pieces(tokenizers):
    student, teacher = tokenizers
    ours, theirs = share_vocabulary(student, teacher)
    assert student.convert_ids_to_tokens(ours) == teacher.convert_ids_to_tokens(theirs)
    assert set(student.convert_ids_to_tokens(ours)) == {*WORDS} - {*PIECES}
    assert ours != theirs


def test_words_are_known_by_their_marks():
    byte_level = Tokenizer(BPE({"Ġmay": 0, "may": 1, "be": 2, "<eos>": 3}, []))
    byte_level.pre_tokenizer = ByteLevel()
    marked = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<eos>")
    whole = Tokenizer(WordLevel({"may": 5, "<unk>": 0}, unk_token="<unk>"))
    whole.pre_tokenizer = Whitespace()
    plain = PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>")
    assert name_tokens(marked) == {" may": 0, "may": 1, "be": 2}
    assert share_vocabulary(marked, plain) == ([0], [5])


def test_words_are_listed_once():
    assert len(set(WORDS)) == len(WORDS) == 2 + len(DAYS) + len(MONTHS) + 1
    assert BAD_WORD not in DAYS + MONTHS
