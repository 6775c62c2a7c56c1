/* wordpiece.h - BERT's WordPiece (Devlin et al. 2019) as a kind of tokenizer for mtt.h - licence as mtt.h

   Include it after mtt.h, also in the file that defines MTT_IMPLEMENTATION, and pass its kind to the
   functions that load or train a tokenizer:

      mtt_wordpiece_options uncased = {.lowercase = 1, .strip_accents = 1};
      mtt_tokenizer_kind kind = mtt_wordpiece(&uncased);
      mtt_prepare_desc desc = {.input = "novel.txt", .output = "novel", .kind = &kind};

   The ids are those of Hugging Face's tokenizers, but no [CLS] and [SEP] are put around a text. Besides a
   tokenizer.json it loads BERT's vocab.txt: one piece on each line, with [UNK] and [SEP] among them. A
   document ends with [SEP]. WordPiece is not lossless: blanks and line ends become single spaces, a
   punctuation mark is a word of its own, and a word becomes [UNK] if the pieces cannot spell it or if it has
   more than 100 characters. Bytes that are not UTF-8 are treated as U+FFFD, a control character.
   A trained vocabulary has [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0..4, then the 1,000 most frequent
   characters by code point, then ##characters by code point, then merges of pairs that occur twice or
   more. */
#ifndef MTT_WORDPIECE_INCLUDED
#define MTT_WORDPIECE_INCLUDED

#ifndef MTT_H_INCLUDED
#error "include mtt.h before wordpiece.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What happens to a text before it is cut into words. The defaults suit Polish; BERT's uncased models want
   lowercase and strip_accents. A tokenizer.json has its own options. */
typedef struct mtt_wordpiece_options {
    int lowercase;     /* default 0 */
    int strip_accents; /* e with an ogonek becomes e; l with a stroke stays, it has no accent; default 0 */
    int keep_controls; /* 1 = control characters are text; default 0, they are dropped */
    int keep_cjk;      /* 1 = Chinese characters form words; default 0, each is a word of its own */
} mtt_wordpiece_options;

/* `options` may be NULL. They must stay until the tokenizer has been loaded or trained. */
MTTDEF mtt_tokenizer_kind mtt_wordpiece(const mtt_wordpiece_options *options);

#ifdef __cplusplus
}
#endif
#endif /* MTT_WORDPIECE_INCLUDED */

#if defined(MTT__LENGTH) && !defined(MTT_WORDPIECE_DONE) /* this file has mtt.h's implementation */
#define MTT_WORDPIECE_DONE

/* Two tables of code points: classes and lower case. All numbers are hexadecimal. The decompositions that
   strip accents are in mtt.h.
      RUN      one code point, or FIRST-LAST, or FIRST-LAST/2 for every second one
      classes  RUN RUN ...          "0021-002F" is the punctuation from ! to /
      cases    RUN DISTANCE, ...    "0041-005A +20": A..Z become a..z, which begin at 0061
   To check a line, look up a code point of it in Unicode's charts.
   CONTROL and CONTROL_BLANK are dropped unless controls are kept; then CONTROL_BLANK ends a word. MARK is
   dropped with the accents. */
enum {
    MTT__CONTROL = 1,
    MTT__CONTROL_BLANK,
    MTT__BLANK,
    MTT__PUNCTUATION,
    MTT__MARK,
    MTT__CJK,
    MTT__CASES /* not a class: the other table */
};
typedef struct mtt__words_class {
    int kind;
    const char *runs;
} mtt__words_class;

/* written by tools/make_unicode.py: from here */
/* As Hugging Face's tokenizers 0.23.3 treat all code points. */
static const mtt__words_class mtt__words_classes[] = {
{MTT__CONTROL, "0000-0008 000E-001F 007F-0084 0086-009F 00AD 0600-0605 061C 06DD 070F 180E 200B-200F"},
{MTT__CONTROL, "202A-202E 2060-2064 2066-206F E000-F8FF FEFF FFF9-FFFB FFFD 110BD 1BCA0-1BCA3 1D173-1D17A"},
{MTT__CONTROL, "E0001 E0020-E007F F0000-FFFFD 100000-10FFFD"},
{MTT__CONTROL_BLANK, "000B-000C 0085"},
{MTT__BLANK, "0009-000A 000D 0020 00A0 1680 2000-200A 2028-2029 202F 205F 3000"},
{MTT__PUNCTUATION, "0021-002F 003A-0040 005B-0060 007B-007E 00A1 00A7 00AB 00B6-00B7 00BB 00BF 037E 0387"},
{MTT__PUNCTUATION, "055A-055F 0589-058A 05BE 05C0 05C3 05C6 05F3-05F4 0609-060A 060C-060D 061B 061E-061F"},
{MTT__PUNCTUATION, "066A-066D 06D4 0700-070D 07F7-07F9 0830-083E 085E 0964-0965 0970 0AF0 0DF4 0E4F"},
{MTT__PUNCTUATION, "0E5A-0E5B 0F04-0F12 0F14 0F3A-0F3D 0F85 0FD0-0FD4 0FD9-0FDA 104A-104F 10FB 1360-1368"},
{MTT__PUNCTUATION, "1400 166D-166E 169B-169C 16EB-16ED 1735-1736 17D4-17D6 17D8-17DA 1800-180A 1944-1945"},
{MTT__PUNCTUATION, "1A1E-1A1F 1AA0-1AA6 1AA8-1AAD 1B5A-1B60 1BFC-1BFF 1C3B-1C3F 1C7E-1C7F 1CC0-1CC7 1CD3"},
{MTT__PUNCTUATION, "2010-2027 2030-2043 2045-2051 2053-205E 207D-207E 208D-208E 2308-230B 2329-232A"},
{MTT__PUNCTUATION, "2768-2775 27C5-27C6 27E6-27EF 2983-2998 29D8-29DB 29FC-29FD 2CF9-2CFC 2CFE-2CFF 2D70"},
{MTT__PUNCTUATION, "2E00-2E2E 2E30-2E42 3001-3003 3008-3011 3014-301F 3030 303D 30A0 30FB A4FE-A4FF"},
{MTT__PUNCTUATION, "A60D-A60F A673 A67E A6F2-A6F7 A874-A877 A8CE-A8CF A8F8-A8FA A8FC A92E-A92F A95F"},
{MTT__PUNCTUATION, "A9C1-A9CD A9DE-A9DF AA5C-AA5F AADE-AADF AAF0-AAF1 ABEB FD3E-FD3F FE10-FE19 FE30-FE52"},
{MTT__PUNCTUATION, "FE54-FE61 FE63 FE68 FE6A-FE6B FF01-FF03 FF05-FF0A FF0C-FF0F FF1A-FF1B FF1F-FF20"},
{MTT__PUNCTUATION, "FF3B-FF3D FF3F FF5B FF5D FF5F-FF65 10100-10102 1039F 103D0 1056F 10857 1091F 1093F"},
{MTT__PUNCTUATION, "10A50-10A58 10A7F 10AF0-10AF6 10B39-10B3F 10B99-10B9C 11047-1104D 110BB-110BC"},
{MTT__PUNCTUATION, "110BE-110C1 11140-11143 11174-11175 111C5-111C9 111CD 111DB 111DD-111DF 11238-1123D"},
{MTT__PUNCTUATION, "112A9 114C6 115C1-115D7 11641-11643 1173C-1173E 12470-12474 16A6E-16A6F 16AF5"},
{MTT__PUNCTUATION, "16B37-16B3B 16B44 1BC9F 1DA87-1DA8B"},
{MTT__MARK, "0300-036F 0483-0487 0591-05BD 05BF 05C1-05C2 05C4-05C5 05C7 0610-061A 064B-065F 0670 06D6-06DC"},
{MTT__MARK, "06DF-06E4 06E7-06E8 06EA-06ED 0711 0730-074A 07A6-07B0 07EB-07F3 0816-0819 081B-0823 0825-0827"},
{MTT__MARK, "0829-082D 0859-085B 08E3-0902 093A 093C 0941-0948 094D 0951-0957 0962-0963 0981 09BC 09C1-09C4"},
{MTT__MARK, "09CD 09E2-09E3 0A01-0A02 0A3C 0A41-0A42 0A47-0A48 0A4B-0A4D 0A51 0A70-0A71 0A75 0A81-0A82 0ABC"},
{MTT__MARK, "0AC1-0AC5 0AC7-0AC8 0ACD 0AE2-0AE3 0B01 0B3C 0B3F 0B41-0B44 0B4D 0B56 0B62-0B63 0B82 0BC0 0BCD"},
{MTT__MARK, "0C00 0C3E-0C40 0C46-0C48 0C4A-0C4D 0C55-0C56 0C62-0C63 0C81 0CBC 0CBF 0CC6 0CCC-0CCD 0CE2-0CE3"},
{MTT__MARK, "0D01 0D41-0D44 0D4D 0D62-0D63 0DCA 0DD2-0DD4 0DD6 0E31 0E34-0E3A 0E47-0E4E 0EB1 0EB4-0EB9"},
{MTT__MARK, "0EBB-0EBC 0EC8-0ECD 0F18-0F19 0F35 0F37 0F39 0F71-0F7E 0F80-0F84 0F86-0F87 0F8D-0F97 0F99-0FBC"},
{MTT__MARK, "0FC6 102D-1030 1032-1037 1039-103A 103D-103E 1058-1059 105E-1060 1071-1074 1082 1085-1086 108D"},
{MTT__MARK, "109D 135D-135F 1712-1714 1732-1734 1752-1753 1772-1773 17B4-17B5 17B7-17BD 17C6 17C9-17D3 17DD"},
{MTT__MARK, "180B-180D 18A9 1920-1922 1927-1928 1932 1939-193B 1A17-1A18 1A1B 1A56 1A58-1A5E 1A60 1A62"},
{MTT__MARK, "1A65-1A6C 1A73-1A7C 1A7F 1AB0-1ABD 1B00-1B03 1B34 1B36-1B3A 1B3C 1B42 1B6B-1B73 1B80-1B81"},
{MTT__MARK, "1BA2-1BA5 1BA8-1BA9 1BAB-1BAD 1BE6 1BE8-1BE9 1BED 1BEF-1BF1 1C2C-1C33 1C36-1C37 1CD0-1CD2"},
{MTT__MARK, "1CD4-1CE0 1CE2-1CE8 1CED 1CF4 1CF8-1CF9 1DC0-1DF5 1DFC-1DFF 20D0-20DC 20E1 20E5-20F0 2CEF-2CF1"},
{MTT__MARK, "2D7F 2DE0-2DFF 302A-302D 3099-309A A66F A674-A67D A69E-A69F A6F0-A6F1 A802 A806 A80B A825-A826"},
{MTT__MARK, "A8C4 A8E0-A8F1 A926-A92D A947-A951 A980-A982 A9B3 A9B6-A9B9 A9BC A9E5 AA29-AA2E AA31-AA32"},
{MTT__MARK, "AA35-AA36 AA43 AA4C AA7C AAB0 AAB2-AAB4 AAB7-AAB8 AABE-AABF AAC1 AAEC-AAED AAF6 ABE5 ABE8 ABED"},
{MTT__MARK, "FB1E FE00-FE0F FE20-FE2F 101FD 102E0 10376-1037A 10A01-10A03 10A05-10A06 10A0C-10A0F"},
{MTT__MARK, "10A38-10A3A 10A3F 10AE5-10AE6 11001 11038-11046 1107F-11081 110B3-110B6 110B9-110BA"},
{MTT__MARK, "11100-11102 11127-1112B 1112D-11134 11173 11180-11181 111B6-111BE 111CA-111CC 1122F-11231"},
{MTT__MARK, "11234 11236-11237 112DF 112E3-112EA 11300-11301 1133C 11340 11366-1136C 11370-11374"},
{MTT__MARK, "114B3-114B8 114BA 114BF-114C0 114C2-114C3 115B2-115B5 115BC-115BD 115BF-115C0 115DC-115DD"},
{MTT__MARK, "11633-1163A 1163D 1163F-11640 116AB 116AD 116B0-116B5 116B7 1171D-1171F 11722-11725"},
{MTT__MARK, "11727-1172B 16AF0-16AF4 16B30-16B36 16F8F-16F92 1BC9D-1BC9E 1D167-1D169 1D17B-1D182"},
{MTT__MARK, "1D185-1D18B 1D1AA-1D1AD 1D242-1D244 1DA00-1DA36 1DA3B-1DA6C 1DA75 1DA84 1DA9B-1DA9F"},
{MTT__MARK, "1DAA1-1DAAF 1E8D0-1E8D6 E0100-E01EF"},
{MTT__CJK, "3400-4DBF 4E00-9FFF F900-FAFF 20000-2A6DF 2A700-2B81F 2B920-2CEAF 2F800-2FA1F"},
};
static const char *const mtt__words_cases[] = {
"0041-005A +20, 00C0-00D5 +20, 00D6-00D8/2 +20, 00D9-00DE +20, 0100-012E/2 +1, 0130 -C7, 0132-0136/2 +1,",
"0139-0147/2 +1, 014A-0176/2 +1, 0178 -79, 0179-017D/2 +1, 0181 +D2, 0182-0184/2 +1, 0186 +CE, 0187 +1,",
"0189-018A +CD, 018B +1, 018E +4F, 018F +CA, 0190 +CB, 0191 +1, 0193 +CD, 0194 +CF, 0196 +D3, 0197 +D1,",
"0198 +1, 019C +D3, 019D +D5, 019F +D6, 01A0-01A4/2 +1, 01A6 +DA, 01A7 +1, 01A9 +DA, 01AC +1, 01AE +DA,",
"01AF +1, 01B1-01B2 +D9, 01B3-01B5/2 +1, 01B7 +DB, 01B8 +1, 01BC +1, 01C4 +2, 01C5 +1, 01C7 +2, 01C8 +1,",
"01CA +2, 01CB-01DB/2 +1, 01DE-01EE/2 +1, 01F1 +2, 01F2-01F4/2 +1, 01F6 -61, 01F7 -38, 01F8-021E/2 +1,",
"0220 -82, 0222-0232/2 +1, 023A +2A2B, 023B +1, 023D -A3, 023E +2A28, 0241 +1, 0243 -C3, 0244 +45, 0245 +47,",
"0246-024E/2 +1, 0370-0372/2 +1, 0376 +1, 037F +74, 0386 +26, 0388-038A +25, 038C +40, 038E-038F +3F,",
"0391-03A0 +20, 03A1-03A3/2 +20, 03A4-03AB +20, 03CF +8, 03D8-03EE/2 +1, 03F4 -3C, 03F7 +1, 03F9 -7,",
"03FA +1, 03FD-03FF -82, 0400-040F +50, 0410-042F +20, 0460-0480/2 +1, 048A-04BE/2 +1, 04C0 +F,",
"04C1-04CD/2 +1, 04D0-052E/2 +1, 0531-0556 +30, 10A0-10C4 +1C60, 10C5-10C7/2 +1C60, 10CD +1C60,",
"13A0-13EF +97D0, 13F0-13F5 +8, 1C89 +1, 1C90-1CBA -BC0, 1CBD-1CBF -BC0, 1E00-1E94/2 +1, 1E9E -1DBF,",
"1EA0-1EFE/2 +1, 1F08-1F0F -8, 1F18-1F1D -8, 1F28-1F2F -8, 1F38-1F3F -8, 1F48-1F4D -8, 1F59-1F5F/2 -8,",
"1F68-1F6F -8, 1F88-1F8F -8, 1F98-1F9F -8, 1FA8-1FAF -8, 1FB8-1FB9 -8, 1FBA-1FBB -4A, 1FBC -9,",
"1FC8-1FCB -56, 1FCC -9, 1FD8-1FD9 -8, 1FDA-1FDB -64, 1FE8-1FE9 -8, 1FEA-1FEB -70, 1FEC -7, 1FF8-1FF9 -80,",
"1FFA-1FFB -7E, 1FFC -9, 2126 -1D5D, 212A -20BF, 212B -2046, 2132 +1C, 2160-216F +10, 2183 +1,",
"24B6-24CF +1A, 2C00-2C2F +30, 2C60 +1, 2C62 -29F7, 2C63 -EE6, 2C64 -29E7, 2C67-2C6B/2 +1, 2C6D -2A1C,",
"2C6E -29FD, 2C6F -2A1F, 2C70 -2A1E, 2C72 +1, 2C75 +1, 2C7E-2C7F -2A3F, 2C80-2CE2/2 +1, 2CEB-2CED/2 +1,",
"2CF2 +1, A640-A66C/2 +1, A680-A69A/2 +1, A722-A72E/2 +1, A732-A76E/2 +1, A779-A77B/2 +1, A77D -8A04,",
"A77E-A786/2 +1, A78B +1, A78D -A528, A790-A792/2 +1, A796-A7A8/2 +1, A7AA -A544, A7AB -A54F, A7AC -A54B,",
"A7AD -A541, A7AE -A544, A7B0 -A512, A7B1 -A52A, A7B2 -A515, A7B3 +3A0, A7B4-A7C2/2 +1, A7C4 -30,",
"A7C5 -A543, A7C6 -8A38, A7C7-A7C9/2 +1, A7CB -A567, A7CC-A7DA/2 +1, A7DC -A641, A7F5 +1, FF21-FF3A +20,",
"10400-10427 +28, 104B0-104D3 +28, 10570-10579 +27, 1057A-1057C/2 +27, 1057D-10589 +27, 1058A-1058C/2 +27,",
"1058D-10591 +27, 10592-10594/2 +27, 10595 +27, 10C80-10CB2 +40, 10D50-10D65 +20, 118A0-118BF +20,",
"16E40-16E5F +20, 16EA0-16EB8 +1B, 1E900-1E921 +22,",
};
/* to here */

enum { MTT__WORD_CHARACTERS = 100, MTT__WORD_ALPHABET = 1000, MTT__CODE_POINTS = 0x110000 };

typedef struct mtt__wordpiece {
    mtt_wordpiece_options options;
    unsigned char classes[MTT__CODE_POINTS];
    mtt__table lower; /* c: its lower case */
    uint32_t unknown;   /* id of [UNK] */
    size_t longest;     /* bytes of the longest piece */
} mtt__wordpiece;

/* ---- the normaliser */

/* Reads a line of the table of `kind`, a class or MTT__CASES. */
static mtt_status mtt__words_line(mtt_env *env, mtt__wordpiece *w, int kind, const char *at)
{
    while (*at) {
        char *end;
        uint32_t c = (uint32_t)strtoul(at, &end, 16), last = c, step, distance;
        if (*end == '-') last = (uint32_t)strtoul(end + 1, &end, 16);
        step = *end == '/' ? 2 : 1;
        at = end + (*end == '/' ? 2 : 0);
        for (; c <= last && kind < MTT__CASES; c += step) w->classes[c] = (unsigned char)kind;
        if (kind < MTT__CASES) continue;
        distance = (uint32_t)strtol(at, &end, 16); /* modulo 2^32 */
        at = end + 1;
        for (; c <= last; c += step)
            if (mtt__table_put(env, &w->lower, c, c + distance)) return MTT_E_MEMORY;
    }
    return MTT_OK;
}

static mtt_status mtt__words_create(mtt_tokenizer *t)
{
    mtt__wordpiece *w = (mtt__wordpiece *)mtt__alloc(t->env, 1, sizeof(*w));
    mtt_status status = MTT_OK;
    size_t i;
    t->own = w;
    if (!w) return MTT_E_MEMORY;
    if (t->kind.options) w->options = *(const mtt_wordpiece_options *)t->kind.options;
    for (i = 0; i < MTT__LENGTH(mtt__words_classes) && !status; i++)
        status = mtt__words_line(t->env, w, mtt__words_classes[i].kind, mtt__words_classes[i].runs);
    for (i = 0; i < MTT__LENGTH(mtt__words_cases) && !status; i++)
        status = mtt__words_line(t->env, w, MTT__CASES, mtt__words_cases[i]);
    return status ? status : mtt__normal_make(t->env, &t->normal);
}

static void mtt__words_destroy(mtt_tokenizer *t)
{
    mtt__wordpiece *w = (mtt__wordpiece *)t->own;
    mtt__free(t->env, w->lower.cells);
    mtt__free(t->env, w);
}

/* A code point without accents: up to four letters (Unicode's NFD without Mn). */
static int mtt__words_strip(const mtt_tokenizer *t, uint32_t c, uint32_t out[4])
{
    const uint32_t count = mtt__normal_parts(t->normal, c, out);
    uint32_t i;
    int n = 0;
    for (i = 0; i < count; i++)
        if (((const mtt__wordpiece *)t->own)->classes[out[i]] != MTT__MARK) out[n++] = out[i];
    return n;
}

/* A text that is being cut into words, to be spelled or to be counted. */
typedef struct mtt__spelling {
    const mtt_tokenizer *t;
    const mtt__wordpiece *w;
    mtt__ids *ids;        /* where the ids of the words go, or NULL: */
    mtt__strings *words;  /* then the words are counted here, */
    uint64_t times;       /* each as often as this */
    mtt_status status;
    size_t size, count; /* bytes and characters of the current word */
    char word[MTT__WORD_CHARACTERS * 4 + 1]; /* a space and the normalised characters */
} mtt__spelling;

/* Spells a word from left to right, each time by the longest piece that fits. If none fits, the word is
   [UNK]. */
static void mtt__words_match(const mtt_tokenizer *t, const char *word, size_t size, mtt__ids *out)
{
    const mtt__wordpiece *w = (const mtt__wordpiece *)t->own;
    int32_t ids[MTT__WORD_CHARACTERS];
    size_t from = 0, end, count = 0;
    uint32_t id = size > 1 ? 0 : MTT__NONE;
    for (; from < size && id != MTT__NONE; from = end) {
        end = w->longest < size - from ? from + w->longest : size;
        for (id = MTT__NONE; end > from; end--)
            if (end == size || (word[end] & 0xc0) != 0x80) {
                id = mtt__strings_find(&t->pieces, word + from, end - from);
                if (id != MTT__NONE) break;
            }
        ids[count++] = (int32_t)id;
    }
    if (id == MTT__NONE) {
        ids[0] = (int32_t)w->unknown;
        count = 1;
    }
    mtt__ids_put(out, ids, count);
}

/* A word that is too long is a space without characters. */
static void mtt__spell_end(mtt__spelling *s)
{
    size_t size = s->count > MTT__WORD_CHARACTERS ? 1 : s->size;
    if (s->count && s->ids) mtt__words_match(s->t, s->word, size, s->ids);
    else if (size > 1 && !s->status) s->status = mtt__strings_count(s->words, s->word, size, s->times);
    s->count = 0;
    s->size = 1;
}

static void mtt__spell(mtt__spelling *s, uint32_t c)
{
    int kind = s->w->classes[c], blank = kind == MTT__BLANK || kind == MTT__CONTROL_BLANK;
    if (blank || kind == MTT__PUNCTUATION) mtt__spell_end(s);
    if (!blank && s->count++ < MTT__WORD_CHARACTERS) s->size += mtt__utf8_put(c, s->word + s->size);
    if (kind == MTT__PUNCTUATION) mtt__spell_end(s);
}

/* Appends a code point to the word as BertNormalizer and BertPreTokenizer do, one after the other. */
static void mtt__spell_point(mtt__spelling *s, uint32_t c)
{
    const mtt_wordpiece_options *o = &s->w->options;
    int kind = s->w->classes[c], whole_word = kind == MTT__CJK && !o->keep_cjk, i, n;
    uint32_t letters[4], lower;
    if (!o->keep_controls && (kind == MTT__CONTROL || kind == MTT__CONTROL_BLANK)) return;
    if (whole_word) mtt__spell_end(s);
    letters[0] = c;
    n = o->strip_accents && c >= 0x80 ? mtt__words_strip(s->t, c, letters) : 1;
    for (i = 0; i < n; i++) {
        lower = mtt__table_find(&s->w->lower, letters[i])->value;
        mtt__spell(s, o->lowercase && lower != MTT__NONE ? lower : letters[i]);
        if (o->lowercase && letters[i] == 0x130) mtt__spell(s, 0x307); /* the only letter that becomes two */
    }
    if (whole_word) mtt__spell_end(s);
}

/* Cuts a text into words. Spells them if there are `ids`, or else counts each of them `times` times. */
static mtt_status mtt__words_each(const mtt_tokenizer *t, const char *text, size_t bytes, mtt__ids *ids,
                                  mtt__strings *words, uint64_t times)
{
    const unsigned char *at = (const unsigned char *)text, *end = at + bytes;
    mtt__spelling s;
    int size;
    s.t = t;
    s.w = (const mtt__wordpiece *)t->own;
    s.ids = ids;
    s.words = words;
    s.times = times;
    s.status = MTT_OK;
    s.count = 0;
    s.word[0] = ' ';
    for (s.size = 1; at < end && !s.status; at += size) {
        const uint32_t c = mtt__utf8_get(at, end, &size);
        mtt__spell_point(&s, c == MTT__NONE ? 0xfffd : c);
    }
    mtt__spell_end(&s);
    return s.status;
}

/* ---- the vocabulary: pieces as they decode, " the" and "ing" */

/* Appends a piece as a vocabulary has it. */
static mtt_status mtt__words_add(mtt_tokenizer *t, const char *at, size_t size, uint32_t *id)
{
    static const char *const silent[] = {"[PAD]", "[CLS]", "[SEP]", "[MASK]"};
    mtt__strings *s = &t->pieces;
    mtt_status status;
    mtt_slice piece = {at, size};
    size_t i, skip = size > 2 && memcmp(at, "##", 2) == 0 ? 3 : 0;
    for (i = 0; i < MTT__LENGTH(silent); i++)
        if (mtt_slice_is(piece, silent[i])) skip = 1;
    if (mtt__strings_reserve(s, size + 1)) return MTT_E_MEMORY;
    s->bytes[s->bytes_size] = ' ';
    memcpy(s->bytes + s->bytes_size + 1, at, size);
    status = mtt__strings_add(s, s->bytes + s->bytes_size + skip, size + 1 - skip, id);
    if (!status && skip == 1) s->items[*id].silent = 1;
    return status;
}

/* NULL, or a fault of the vocabulary. */
static const char *mtt__words_finish(mtt_tokenizer *t)
{
    mtt__wordpiece *w = (mtt__wordpiece *)t->own;
    size_t i;
    for (i = 0; i < t->pieces.count; i++)
        if (w->longest < t->pieces.items[i].size) w->longest = t->pieces.items[i].size;
    w->unknown = mtt__strings_find(&t->pieces, " [UNK]", 6);
    t->end_of_text = mtt__strings_find(&t->pieces, "[SEP]", 5);
    if (w->unknown != MTT__NONE && t->end_of_text != MTT__NONE) return NULL;
    return "[UNK] or [SEP] is not in the vocabulary";
}

/* Up to the next of the blanks that end a word with all options. */
static size_t mtt__words_cut(const mtt_tokenizer *t, const char *text, size_t bytes)
{
    size_t n = 1;
    (void)t;
    while (n < bytes && !memchr(" \n\r\t", text[n], 4)) n++;
    return n;
}

static mtt_status mtt__words_spell(const mtt_tokenizer *t, const char *word, size_t bytes, mtt__ids *out)
{
    return mtt__words_each(t, word, bytes, out, NULL, 0);
}

/* ---- training */

/* A character, with the space before it; MTT__NONE if it is too rare. */
static size_t mtt__words_symbol(const mtt_tokenizer *t, const char *at, size_t size, uint32_t *id)
{
    size_t n = 1u + (*at == ' ');
    while (n < size && (at[n] & 0xc0) == 0x80) n++;
    *id = mtt__strings_find(&t->pieces, at, n);
    return n;
}

/* Marks the most frequent characters of the words in `found`, and those that occur inside a word. */
enum { MTT__WORD_INNER = 1, MTT__WORD_FREQUENT = 2 };
static mtt_status mtt__words_characters(mtt_env *env, const mtt__strings *words, unsigned char *found)
{
    uint64_t *counts = (uint64_t *)mtt__alloc(env, MTT__CODE_POINTS, sizeof(*counts));
    mtt_status status = counts ? MTT_OK : MTT_E_MEMORY;
    mtt__heap heap = {NULL, 0, 0};
    mtt__ranked top;
    size_t i;
    for (i = 0; i < words->count && !status; i++) {
        const unsigned char *at = (const unsigned char *)words->bytes + words->items[i].at + 1;
        const unsigned char *begin = at, *end = begin + words->items[i].size - 1;
        int size;
        for (; at < end; at += size) {
            const uint32_t c = mtt__utf8_get(at, end, &size);
            counts[c] += words->items[i].count;
            if (at > begin) found[c] = MTT__WORD_INNER;
        }
    }
    for (i = 0; i < MTT__CODE_POINTS && !status; i++)
        if (counts[i]) status = mtt__heap_push(env, &heap, ~counts[i], i);
    for (i = 0; !status && i < MTT__WORD_ALPHABET && mtt__heap_pop(&heap, &top); i++)
        found[top.tie] = (unsigned char)(found[top.tie] | MTT__WORD_FREQUENT);
    mtt__free(env, counts);
    mtt__free(env, heap.at);
    return status;
}

/* Appends the special pieces, the frequent characters, and their ## forms. */
static mtt_status mtt__words_alphabet(mtt_tokenizer *t, const mtt__strings *words)
{
    static const char *const special[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
    unsigned char *found = (unsigned char *)mtt__alloc(t->env, MTT__CODE_POINTS, 1);
    mtt_status status = found ? mtt__words_characters(t->env, words, found) : MTT_E_MEMORY;
    uint32_t c, id;
    size_t i;
    char text[8] = "##";
    for (i = 0; i < MTT__LENGTH(special) && !status; i++)
        status = mtt__words_add(t, special[i], strlen(special[i]), &id);
    for (c = 0; c < MTT__CODE_POINTS && !status; c++)
        if (found[c] & MTT__WORD_FREQUENT)
            status = mtt__words_add(t, text + 2, mtt__utf8_put(c, text + 2), &id);
    for (c = 0; c < MTT__CODE_POINTS && !status; c++)
        if (found[c] == (MTT__WORD_FREQUENT | MTT__WORD_INNER))
            status = mtt__words_add(t, text, 2 + mtt__utf8_put(c, text + 2), &id);
    mtt__free(t->env, found);
    return status;
}

static mtt_status mtt__words_learn(mtt_tokenizer *t, int vocab, const mtt__strings *pieces)
{
    mtt__strings words;
    mtt__merges merges;
    mtt_status status;
    size_t i;
    memset(&words, 0, sizeof(words));
    memset(&merges, 0, sizeof(merges));
    words.env = t->env;
    status = mtt__table_grow(t->env, &merges.ranks);
    for (i = 0; i < pieces->count && !status; i++) {
        const mtt__string *piece = &pieces->items[i];
        status = mtt__words_each(t, pieces->bytes + piece->at, piece->size, NULL, &words, piece->count);
    }
    if (!status) status = mtt__words_alphabet(t, &words);
    if (!status && (size_t)vocab < t->pieces.count)
        status = mtt__fail(t->env, MTT_E_ARGUMENT, "%d ids cannot hold the characters of the text and five "
                           "special pieces: ask for %zu or more", vocab, t->pieces.count);
    if (!status) status = mtt__learn(t, &merges, &words, mtt__words_symbol, 2, (size_t)vocab);
    if (!status) mtt__words_finish(t);
    mtt__strings_free(&words);
    mtt__free(t->env, merges.at);
    mtt__free(t->env, merges.ranks.cells);
    return status;
}

/* ---- files */

/* Appends a piece of a file, which must be UTF-8 and new. Sets *fault if it is not. */
static mtt_status mtt__words_load_piece(mtt_tokenizer *t, mtt_slice piece, uint64_t id, const char **fault)
{
    uint32_t index;
    mtt_status status;
    if (!piece.size || !mtt_utf8_valid(piece.at, piece.size))
        return *fault = "a piece is empty or not UTF-8", MTT_OK;
    status = mtt__words_add(t, piece.at, piece.size, &index);
    if (!status && (id != index || id + 1 != t->pieces.count))
        *fault = "a piece occurs twice, or its id is not the next";
    return status;
}

/* A vocab.txt: a piece a line, whose id is the number of the line from 0. Blanks at the end of a line, such
   as that of a Windows line end, do not count. */
static mtt_status mtt__words_load_list(mtt_tokenizer *t, mtt__json_file *f)
{
    const char *at = f->j.begin, *fault = NULL;
    mtt_status status = MTT_OK;
    uint32_t line = 0;
    while (!status && !fault && at < f->j.end) {
        const char *stop = (const char *)memchr(at, '\n', (size_t)(f->j.end - at));
        mtt_slice piece;
        piece.at = at;
        piece.size = (size_t)((stop ? stop : f->j.end) - at);
        while (piece.size && memchr(" \t\r", piece.at[piece.size - 1], 3)) piece.size--;
        at = stop ? stop + 1 : f->j.end;
        status = mtt__words_load_piece(t, piece, line++, &fault);
    }
    if (!status && !fault) fault = mtt__words_finish(t);
    if (status || !fault) return status;
    return mtt__fail(t->env, MTT_E_FORMAT, "%s:%u: %s: expected a tokenizer.json, a vocab.bpe, a .tiktoken "
                     "file or BERT's vocab.txt", f->path, (unsigned)line, fault);
}

static mtt_status mtt__words_load(mtt_tokenizer *t, mtt__json_file *f)
{
    static const mtt__json_rule rules[] = {
        {"version", "\"1.0\""},
        {"added_tokens", "["},
        {"normalizer.type", "\"BertNormalizer\""},
        {"normalizer.clean_text", "true|false"},
        {"normalizer.handle_chinese_chars", "true|false"},
        {"normalizer.strip_accents", "null|true|false"},
        {"normalizer.lowercase", "true|false"},
        {"pre_tokenizer.type", "\"BertPreTokenizer\""},
        {"post_processor", "null|{|missing"},
        {"post_processor.type", "\"BertProcessing\"|\"TemplateProcessing\"|missing"},
        {"decoder.type", "\"WordPiece\"|missing"},
        {"model.continuing_subword_prefix", "\"##\""},
        {"model.unk_token", "\"[UNK]\""},
        {"model.max_input_chars_per_word", "100"},
        {"model.vocab", "{"},
    };
    mtt_wordpiece_options *o = &((mtt__wordpiece *)t->own)->options;
    mtt_json *j = &f->j;
    const char *fault = NULL;
    mtt_status status = MTT_OK;
    mtt__added token;
    mtt_slice text;
    uint64_t id;
    int added = 0;
    if (!f->key_count) return mtt__words_load_list(t, f);
    status = mtt__json_check(f, rules, MTT__LENGTH(rules));
    if (status) return status;
    o->lowercase = mtt__vocab_is(f, "normalizer.lowercase", "true");
    o->keep_controls = mtt__vocab_is(f, "normalizer.clean_text", "false");
    o->keep_cjk = mtt__vocab_is(f, "normalizer.handle_chinese_chars", "false");
    text = mtt__json_value(f, "normalizer.strip_accents");
    o->strip_accents = mtt_slice_is(text, "true") || (o->lowercase && mtt_slice_is(text, "null"));
    j->at = mtt__json_value(f, "added_tokens").at;
    for (mtt_json_begin(j, '['); mtt_json_item(j) && mtt__vocab_added(j, &token, &text); added = 1)
        if (!token.special) mtt__json_fail(j, "an added token must be special");
    if (!added) mtt__json_fail(j, "no added token");
    if (j->fault) return mtt__vocab_fail(f, NULL);
    j->at = mtt__json_value(f, "model.vocab").at;
    for (mtt_json_begin(j, '{'); !status && mtt_json_key(j, &text) && mtt_json_u64(j, &id);) {
        text.size = mtt_json_unescape(text, (char *)text.at);
        status = mtt__words_load_piece(t, text, id, &fault);
        if (fault) mtt__json_fail(j, fault);
    }
    fault = mtt__words_finish(t);
    if (fault) mtt__json_fail(j, fault);
    return !status && j->fault ? mtt__vocab_fail(f, NULL) : status;
}

/* Writes a piece as a vocabulary has it, without quotes around it. */
static void mtt__words_put(const mtt__out *out, const mtt_tokenizer *t, uint32_t id)
{
    const mtt__string *piece = &t->pieces.items[id];
    const char *at = t->pieces.bytes + piece->at, *end = at + piece->size;
    char escaped[6];
    if (*at == ' ') at++;
    else if (!piece->silent) mtt__put_json(out, "##");
    for (; at < end; at++) out->write(out->user, escaped, mtt__json_escape(*at, escaped));
}

static void mtt__words_print(const mtt_tokenizer *t, mtt_write_fn write, void *user)
{
    static const char *const truth[] = {"false", "true"};
    const mtt__wordpiece *w = (const mtt__wordpiece *)t->own;
    const mtt_wordpiece_options *o = &w->options;
    const mtt__out out = {write, user};
    const char *between = "";
    uint32_t i;
    mtt__put_json(&out, "{'version':'1.0','truncation':null,'padding':null,'added_tokens':[");
    for (i = 0; i < t->pieces.count; i++) {
        if (i != t->end_of_text && i != w->unknown && !t->pieces.items[i].silent) continue;
        mtt__put_json(&out, "%s{'id':%u,'content':'", between, (unsigned)i);
        mtt__words_put(&out, t, i);
        mtt__put_json(&out, "','single_word':false,'lstrip':false,'rstrip':false,'normalized':false,");
        mtt__put_json(&out, "'special':true}");
        between = ",";
    }
    mtt__put_json(&out,
                  "],'normalizer':{'type':'BertNormalizer','clean_text':%s,'handle_chinese_chars':%s,"
                  "'strip_accents':%s,'lowercase':%s},'pre_tokenizer':{'type':'BertPreTokenizer'},"
                  "'post_processor':null,'decoder':{'type':'WordPiece','prefix':'##','cleanup':false},"
                  "'model':{'type':'WordPiece','unk_token':'[UNK]','continuing_subword_prefix':'##',"
                  "'max_input_chars_per_word':%d,'vocab':{", truth[!o->keep_controls], truth[!o->keep_cjk],
                  truth[!!o->strip_accents], truth[!!o->lowercase], (int)MTT__WORD_CHARACTERS);
    for (i = 0; i < t->pieces.count; i++) {
        mtt__put_json(&out, i ? ",'" : "'");
        mtt__words_put(&out, t, i);
        mtt__put_json(&out, "':%u", (unsigned)i);
    }
    mtt__put_json(&out, "}}}\n");
}

MTTDEF mtt_tokenizer_kind mtt_wordpiece(const mtt_wordpiece_options *options)
{
    mtt_tokenizer_kind kind;
    kind.name = "WordPiece";
    kind.options = options;
    kind.options_bytes = options ? sizeof(*options) : 0;
    kind.create = mtt__words_create;
    kind.destroy = mtt__words_destroy;
    kind.load = mtt__words_load;
    kind.learn = mtt__words_learn;
    kind.cut = mtt__words_cut;
    kind.spell = mtt__words_spell;
    kind.print = mtt__words_print;
    kind.end_of_text = "[SEP]";
    return kind;
}

#endif /* MTT_WORDPIECE_DONE */
