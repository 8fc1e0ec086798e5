"""The ids of a foreign tokeniser's tokens by their names: those it adds to a text are looked up here, whatever file names them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.settings import load_object, read

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILE = "vocab.json"
ADDED_FILE = "added_tokens.json"
SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model")
_MAX_SENTENCEPIECE_BYTES = 1 << 26
# Before the pieces of a sentencepiece model, mBART and NLLB have tokens of fairseq's.
_FAIRSEQ = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}

M2M100_LANGUAGES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy id ig ilo is "
    "it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su "
    "sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
).split()
WMT21_LANGUAGES = "en ha is ja cs ru zh de".split()
MBART_LANGUAGES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX ro_RO ru_RU "
    "si_LK tr_TR vi_VN zh_CN"
).split()
MBART50_LANGUAGES = [
    *MBART_LANGUAGES,
    *(
        "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN "
        "th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
    ).split(),
]
NLLB_LANGUAGES = (
    "ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab arb_Arab ars_Arab ary_Arab arz_Arab "
    "asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn bak_Cyrl bam_Latn ban_Latn bel_Cyrl bem_Latn ben_Beng bho_Deva bjn_Arab "
    "bjn_Latn bod_Tibt bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn cjk_Latn ckb_Arab crh_Latn cym_Latn dan_Latn deu_Latn "
    "dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn est_Latn eus_Latn ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn "
    "fra_Latn fur_Latn fuv_Latn gla_Latn gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn "
    "hun_Latn hye_Armn ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn kac_Latn kam_Latn kan_Knda kas_Arab "
    "kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn kon_Latn kor_Hang "
    "kmr_Latn lao_Laoo lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn lua_Latn lug_Latn luo_Latn lus_Latn "
    "mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr "
    "nld_Latn nno_Latn nob_Latn npi_Deva nso_Latn nus_Latn nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn "
    "por_Latn prs_Arab pbt_Arab quy_Latn ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng scn_Latn shn_Mymr sin_Sinh slk_Latn "
    "slv_Latn smo_Latn sna_Latn snd_Arab som_Latn sot_Latn spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn "
    "szl_Latn tam_Taml tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn tso_Latn tuk_Latn "
    "tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab uzn_Latn vec_Latn vie_Latn war_Latn wol_Latn xho_Latn "
    "ydd_Hebr yor_Latn yue_Hant zho_Hans zho_Hant zul_Latn"
).split()


def read_token_ids(folder: Path, tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of a folder's tokens by name; those of a piece of text are among them where a file names them.

    Args:
        folder: The foreign folder.
        tokenizer: Its `tokenizer_config.json`.

    Raises:
        ForeignError: If a file is damaged.
    """
    found = dict(_pieces(folder))
    if (folder / ADDED_FILE).exists():
        found.update(_checked(folder / ADDED_FILE, load_object(folder / ADDED_FILE).items()))
    added = tokenizer.get("added_tokens_decoder")
    if isinstance(added, dict):
        path = folder / "tokenizer_config.json"
        found.update(_checked(path, ((_content(token), _whole(index)) for index, token in added.items())))
    return found


def family_tokens(codes: list[str], token_ids: Mapping[str, int], folder: Path, is_fairseq: bool) -> dict[str, int]:
    """Return the ids of a family's language tokens where the files may not name them: after all pieces, in the family's order.

    Args:
        codes: The family's tokens, in its order.
        token_ids: What `read_token_ids` found.
        folder: The foreign folder.
        is_fairseq: Whether four tokens of fairseq's replace three of the sentencepiece model.
    """
    found = {code: token_ids[code] for code in codes if code in token_ids}
    if found:
        return found
    if is_fairseq:
        path = _sentencepiece(folder)
        first = 0 if path is None else _processor(path).vocab_size() + 1
    else:
        path = folder / VOCABULARY_FILE
        first = len(load_object(path)) if path.exists() else 0
    return {code: first + index for index, code in enumerate(codes)} if first else {}


def _pieces(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the pieces of the file that says most about ids."""
    if (path := folder / TOKENIZER_FILE).exists():
        yield from _tokenizers_pieces(path)
    elif (path := folder / VOCABULARY_FILE).exists():
        yield from _checked(path, load_object(path).items())
    elif (model := _sentencepiece(folder)) is not None:
        processor = _processor(model)
        if model.name.startswith("sentencepiece.bpe"):
            yield from _FAIRSEQ.items()
        else:
            yield from ((processor.id_to_piece(index), index) for index in range(processor.vocab_size()))


def _tokenizers_pieces(path: Path) -> Iterator[tuple[str, int]]:
    content = load_object(path)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from _checked(path, vocabulary.items())
    elif isinstance(vocabulary, list):
        yield from _checked(path, ((piece[0] if isinstance(piece, list) and piece else None, i) for i, piece in enumerate(vocabulary)))
    added = content.get("added_tokens")
    if isinstance(added, list):
        yield from _checked(path, ((_content(token), token.get("id") if isinstance(token, dict) else None) for token in added))


def _checked(path: Path, pairs: Any) -> Iterator[tuple[str, int]]:
    for token, index in pairs:
        if not isinstance(token, str) or not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise ForeignError(f"{path}: {token!r:.60} and {index!r:.60} are not a token and its id")
        yield token, index


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _whole(index: Any) -> Any:
    return int(index) if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 10 else index


def _sentencepiece(folder: Path) -> Path | None:
    return next((folder / name for name in SENTENCEPIECE_FILES if (folder / name).exists()), None)


def _processor(path: Path) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(read(path, _MAX_SENTENCEPIECE_BYTES))
    except (RuntimeError, OSError, ValueError) as error:
        raise ForeignError(f"{path}: not a sentencepiece model: {error}") from error
    return processor
