"""Languages of families by code, and other names of languages: `deu_Latn` is also `de`, `deu`, `ger`, `German`.

Names are looked up at import and kept in the checkpoint. The data are langcodes': the registry of language tags, Unicode's CLDR.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import langcodes
from langcodes import data_dicts, registry_parser
from langcodes.tag_parser import LanguageTagError

from dragoman.model.generation import MAX_LANGUAGE_NAMES, MAX_NAME_CHARACTERS, spelling
from dragoman.model.importers.files import words

# Languages of families whose files do not always name them, in the order of their tokens.
M2M100_LANGUAGES = words(
    """
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy id ig ilo is
    it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su
    sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
    """
)
WMT21_LANGUAGES = ("en", "ha", "is", "ja", "cs", "ru", "zh", "de")
MBART_LANGUAGES = words(
    """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX ro_RO ru_RU
    si_LK tr_TR vi_VN zh_CN
    """
)
MBART50_LANGUAGES = MBART_LANGUAGES + words(
    """
    af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH
    tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
    """
)
NLLB_LANGUAGES = words(
    """
    ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab arb_Arab ars_Arab ary_Arab arz_Arab
    asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn bak_Cyrl bam_Latn ban_Latn bel_Cyrl bem_Latn ben_Beng bho_Deva bjn_Arab
    bjn_Latn bod_Tibt bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn cjk_Latn ckb_Arab crh_Latn cym_Latn dan_Latn deu_Latn
    dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn est_Latn eus_Latn ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn
    fra_Latn fur_Latn fuv_Latn gla_Latn gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn
    hun_Latn hye_Armn ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn kac_Latn kam_Latn kan_Knda kas_Arab
    kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn kon_Latn kor_Hang
    kmr_Latn lao_Laoo lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn lua_Latn lug_Latn luo_Latn lus_Latn
    mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr
    nld_Latn nno_Latn nob_Latn npi_Deva nso_Latn nus_Latn nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn
    por_Latn prs_Arab pbt_Arab quy_Latn ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng scn_Latn shn_Mymr sin_Sinh slk_Latn
    slv_Latn smo_Latn sna_Latn snd_Arab som_Latn sot_Latn spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn
    szl_Latn tam_Taml tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn tso_Latn tuk_Latn
    tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab uzn_Latn vec_Latn vie_Latn war_Latn wol_Latn xho_Latn
    ydd_Hebr yor_Latn yue_Hant zho_Hans zho_Hant zul_Latn
    """
)

# A claim on a spelling: the lower its rank, the better; of several best ones, none is granted.
_EXACT, _DEFAULT, _REGION, _ALONE = range(4)
_MACRO = 10  # Standard Arabic is Arabic: the language that CLDR takes for a group is called by the group's name
_SCRIPT = 16  # a usual script that the code lacks
_MEMBER = 30  # a language of a group, where nothing else has the group's name
_NO_REGION = "XX"  # in mBART's codes
_OF_A_GROUP = " (individual language)"  # added by CLDR to a name that is its group's, too

# The group that each standard member is called by; CLDR takes Norwegian for Bokmål without saying so in this table.
_STANDARD = {**data_dicts.NORMALIZED_MACROLANGUAGES, "nb": "no"}

Claim = tuple[str, int]


class Tag(NamedTuple):
    """A language, its script and its region; None where the code lacks them."""

    language: str
    script: str | None
    region: str | None


def other_names(codes: Sequence[str], aliases: Mapping[str, str] | None = None) -> list[list[str]]:
    """Return every spelling that means each of a model's languages, beside its code's own; none means two.

    A language without script or region is the one in the script, then the region, that is its usual one; a group of languages
    (`ar`, `fa`, `zh`) is its standard member.
    `aliases` has the language's own code for each code that is no language's, or another's.
    """
    tags = [_parsed((aliases or {}).get(code, code)) for code in codes]
    counts = Counter(tag.language for tag in tags if tag)
    taken = {spelling(code) for code in codes}
    claims: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, tag in enumerate(tags):
        best: dict[str, int] = {}
        for name, rank in _claims(tag, counts[tag.language] > 1) if tag else ():
            best[name] = min(rank, best.get(name, rank))
        for name, rank in best.items():
            claims[name].append((rank, index))
    names: list[list[tuple[int, str]]] = [[] for _ in codes]
    for name, claimants in claims.items():
        first, *others = sorted(claimants)
        is_shared = bool(others) and others[0][0] == first[0]
        if 0 < len(name) <= MAX_NAME_CHARACTERS and name not in taken and not is_shared:
            names[first[1]].append((first[0], name))
    return [
        [name for _, name in sorted(found, key=lambda one: (one[0], len(one[1]), one[1]))[:MAX_LANGUAGE_NAMES]] for found in names
    ]


def english_name(code: str) -> str:
    """Return the English name of a language, for example `German` for `de`; nothing for a code that is none."""
    tag = _parsed(code)
    return "" if tag is None else _name(tag.language)


def is_group(code: str) -> bool:
    """Return whether a code is of several languages (`roa`, `mul`), or of none that is known."""
    tag = _parsed(code)
    return tag is None or tag.language in _groups()


def _claims(tag: Tag, is_told_apart: bool) -> Iterator[Claim]:
    """Yield the names of a language, each with the rank of its claim; `is_told_apart` where the model has the language twice."""
    yield from _codes(tag.language, tag)
    yield from _regions(tag)
    yield from _english(tag.language, tag, is_told_apart)
    macro = _STANDARD.get(tag.language)
    for language in [*([macro] if macro else []), *(one for one, group in _STANDARD.items() if group == tag.language)]:
        for name, rank in (*_codes(language, tag), *_english(language, tag, is_told_apart)):
            yield name, _MACRO + rank
    if macro is None and (group := data_dicts.MACROLANGUAGES.get(tag.language)) is not None:
        for name, _ in (*_codes(group, tag), *_english(group, tag, is_told_apart)):
            yield name, _MEMBER


def _bare_rank(tag: Tag) -> int:
    """Return the rank of a code's claim on its language's plain name."""
    usual = _usual(tag.language, None)
    if tag.script is None and tag.region is None:
        return _EXACT
    if _written(tag) not in (usual.script, None):
        return _ALONE
    return _DEFAULT if tag.region is None else _REGION if tag.region == usual.region else _ALONE


def _written(tag: Tag) -> str | None:
    """Return the script of a language: the code's, or the usual one of its region."""
    return tag.script or _usual(tag.language, tag.region).script


def _codes(language: str, tag: Tag) -> Iterator[Claim]:
    """Yield the claims under the codes of a language, which is the tag's or one that is as good as it."""
    bare, script, region = _bare_rank(tag), _written(tag), tag.region
    for form in _forms(language):
        yield spelling(form), bare
        if script is not None:
            yield spelling(f"{form}_{script}"), _SCRIPT if tag.script is None or region else _EXACT
        if region is not None:
            yield spelling(f"{form}_{region}"), _DEFAULT if tag.script else _EXACT
            yield spelling(f"{form}_{script}_{region}"), _EXACT if tag.script else _DEFAULT


def _regions(tag: Tag) -> Iterator[Claim]:
    """Yield the claims of a script that is not the language's usual one on the regions that write it (`zh_tw`)."""
    if tag.script is not None and tag.script != _usual(tag.language, None).script:
        for other, full in data_dicts.LIKELY_SUBTAGS.items():
            parts = other.split("-")
            if full.split("-")[1] == tag.script and len(parts) == 2 and parts[0] == tag.language and len(parts[1]) == 2:
                yield spelling(f"{tag.language}_{parts[1]}"), _REGION


def _english(language: str, tag: Tag, is_told_apart: bool) -> Iterator[Claim]:
    """Yield the claims under a language's English name, with script and region only where the model tells them apart."""
    name = _name(language)
    if not name:
        return
    yield spelling(name), _bare_rank(tag)
    if is_told_apart and tag.script is not None:
        script = langcodes.Language.make(script=tag.script).script_name()
        yield from ((spelling(both), _EXACT) for both in (f"{name} {script}", f"{name} ({script})", f"{script} {name}"))
    if is_told_apart and tag.region is not None:
        region = langcodes.Language.make(territory=tag.region).territory_name()
        yield from ((spelling(both), _EXACT) for both in (f"{name} {region}", f"{name} ({region})"))


def _name(language: str) -> str:
    name = langcodes.Language.make(language=language).language_name()
    return "" if name.startswith("Unknown language") else name.removesuffix(_OF_A_GROUP)


@cache
def _forms(language: str) -> tuple[str, ...]:
    """Return the codes of a language: two letters, three in both standards, and those that were replaced."""
    forms = {language}
    forms.update(
        table[language] for table in (data_dicts.LANGUAGE_ALPHA3, data_dicts.LANGUAGE_ALPHA3_BIBLIOGRAPHIC) if language in table
    )
    forms.update(old for old, new in data_dicts.LANGUAGE_REPLACEMENTS.items() if new == language and len(old) <= 3)
    return tuple(sorted(forms))


@cache
def _usual(language: str, region: str | None) -> Tag:
    """Return a language with the script and the region that are its usual ones, or with the script of a region; None: not known."""
    likely = data_dicts.LIKELY_SUBTAGS
    full = likely.get(f"{language}-{region}") or likely.get(language)
    if full is not None:
        return Tag(*full.split("-"))
    if (group := _STANDARD.get(language)) is not None:
        return _usual(group, region)
    return Tag(language, data_dicts.DEFAULT_SCRIPTS.get(language), None)


@cache
def _groups() -> frozenset[str]:
    """Return the codes of the registry that are of several languages."""
    read: Callable[[], Iterable[Mapping[str, Any]]] = registry_parser.parse_registry
    return frozenset(entry["Subtag"] for entry in read() if entry.get("Scope") in ("collection", "special") and "Subtag" in entry)


@cache
def _parsed(code: str) -> Tag | None:
    """Return a code as language, script and region, the language by its shortest code; None for what is no code."""
    try:
        tag = langcodes.Language.get(code.replace("_", "-"), normalize=False)
    except (LanguageTagError, ValueError):
        return None
    if tag.language is None or not langcodes.tag_is_valid(tag.language):
        return None
    shortest = data_dicts.LANGUAGE_REPLACEMENTS.get(tag.language, tag.language)
    # A code that stands for a language in a region or a script (`prs`, `sh`) stays itself.
    language = tag.language if "-" in shortest else shortest
    return Tag(language, tag.script, None if tag.territory == _NO_REGION else tag.territory)
