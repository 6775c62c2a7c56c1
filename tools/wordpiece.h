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

#ifdef MTT_IMPLEMENTATION
#ifndef MTT_WORDPIECE_DONE
#define MTT_WORDPIECE_DONE

/* Three tables of code points: classes, lower case, and letters without accents. All numbers are
   hexadecimal.
      RUN      one code point, or FIRST-LAST, or FIRST-LAST/2 for every second one
      classes  RUN RUN ...          "0021-002F" is the punctuation from ! to /
      cases    RUN DISTANCE, ...    "0041-005A +20": A..Z become a..z, which begin at 0061
      bases    RUN LETTERS ...,     "00C0-00C5 0041": six kinds of A with an accent become A. Further LETTERS
                                    are those of the code points after the run, up to the next that ends in
                                    0: "0108 0043 0063" has 0108 and 0109. Several letters of one code point
                                    are joined by +. Hangul is not listed: it has a formula
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
    MTT__CASES, /* not a class: the other two tables */
    MTT__BASES
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
static const char *const mtt__words_bases[] = {
"00C0-00C5 0041, 00C7 0043, 00C8-00CB 0045, 00CC-00CF 0049, 00D1 004E, 00D2-00D6 004F, 00D9-00DC 0055 0059,",
"00E0-00E5 0061, 00E7 0063, 00E8-00EB 0065, 00EC-00EF 0069, 00F1 006E, 00F2-00F6 006F, 00F9-00FC 0075 0079,",
"00FF 0079, 0100 0041 0061 0041 0061 0041 0061 0043 0063 0043 0063 0043 0063 0043 0063 0044 0064,",
"0112 0045 0065 0045 0065 0045 0065 0045 0065 0045 0065 0047 0067 0047 0067,",
"0120 0047 0067 0047 0067 0048 0068, 0128 0049 0069 0049 0069 0049 0069 0049 0069, 0130 0049,",
"0134 004A 006A 004B 006B, 0139 004C 006C 004C 006C 004C 006C, 0143 004E 006E 004E 006E 004E 006E,",
"014C 004F 006F 004F 006F, 0150 004F 006F, 0154 0052 0072 0052 0072 0052 0072 0053 0073 0053 0073 0053 0073,",
"0160 0053 0073 0054 0074 0054 0074, 0168 0055 0075 0055 0075 0055 0075 0055 0075,",
"0170 0055 0075 0055 0075 0057 0077 0059 0079 0059 005A 007A 005A 007A 005A 007A, 01A0 004F 006F, 01AF 0055,",
"01B0 0075, 01CD 0041 0061 0049, 01D0 0069 004F 006F 0055 0075 0055 0075 0055 0075 0055 0075 0055 0075,",
"01DE 0041 0061, 01E0 0041 0061 00C6 00E6, 01E6 0047 0067 004B 006B 004F 006F 004F 006F 01B7 0292,",
"01F0 006A, 01F4 0047 0067, 01F8 004E 006E 0041 0061 00C6 00E6 00D8 00F8,",
"0200 0041 0061 0041 0061 0045 0065 0045 0065 0049 0069 0049 0069 004F 006F 004F 006F,",
"0210 0052 0072 0052 0072 0055 0075 0055 0075 0053 0073 0054 0074, 021E 0048 0068,",
"0226 0041 0061 0045 0065 004F 006F 004F 006F 004F 006F, 0230 004F 006F 0059 0079, 0374 02B9, 037E 003B,",
"0385 00A8 0391 00B7 0395 0397 0399, 038C 039F, 038E 03A5 03A9, 0390 03B9,",
"03AA 0399 03A5 03B1 03B5 03B7 03B9, 03B0 03C5, 03CA 03B9 03C5 03BF 03C5 03C9, 03D3-03D4 03D2,",
"0400-0401 0415, 0403 0413, 0407 0406, 040C 041A 0418 0423, 0419 0418, 0439 0438, 0450-0451 0435, 0453 0433,",
"0457 0456, 045C 043A 0438 0443, 0476 0474 0475, 04C1 0416 0436, 04D0 0410 0430 0410 0430, 04D6 0415 0435,",
"04DA 04D8 04D9 0416 0436 0417 0437, 04E2 0418 0438 0418 0438 041E 043E, 04EA 04E8 04E9 042D 044D 0423 0443,",
"04F0 0423 0443 0423 0443 0427 0447, 04F8 042B 044B, 0622-0623 0627 0648 0627 064A, 06C0 06D5, 06C2 06C1,",
"06D3 06D2, 0929 0928, 0931 0930, 0934 0933, 0958 0915 0916 0917 091C 0921 0922 092B 092F,",
"09CB 09C7+09BE 09C7+09D7, 09DC 09A1 09A2, 09DF 09AF, 0A33 0A32, 0A36 0A38, 0A59 0A16 0A17 0A1C, 0A5E 0A2B,",
"0B48 0B47, 0B4B 0B47+0B3E 0B47+0B57, 0B5C 0B21 0B22, 0B94 0B92+0BD7, 0BCA 0BC6+0BBE 0BC7+0BBE 0BC6+0BD7,",
"0CC0 0CD5, 0CC7 0CD5 0CD6, 0CCA 0CC2 0CC2+0CD5, 0D4A 0D46+0D3E 0D47+0D3E 0D46+0D57, 0DDA 0DD9,",
"0DDC-0DDD 0DD9+0DCF 0DD9+0DDF, 0F43 0F42, 0F4D 0F4C, 0F52 0F51, 0F57 0F56, 0F5C 0F5B, 0F69 0F40, 1026 1025,",
"1B06 1B05+1B35, 1B08 1B07+1B35, 1B0A 1B09+1B35, 1B0C 1B0B+1B35, 1B0E 1B0D+1B35, 1B12 1B11+1B35, 1B3B 1B35,",
"1B3D 1B35, 1B40 1B3E+1B35 1B3F+1B35, 1B43 1B35,",
"1E00 0041 0061 0042 0062 0042 0062 0042 0062 0043 0063 0044 0064 0044 0064 0044 0064,",
"1E10 0044 0064 0044 0064 0045 0065 0045 0065 0045 0065 0045 0065 0045 0065 0046 0066,",
"1E20 0047 0067 0048 0068 0048 0068 0048 0068 0048 0068 0048 0068 0049 0069 0049 0069,",
"1E30 004B 006B 004B 006B 004B 006B 004C 006C 004C 006C 004C 006C 004C 006C 004D 006D,",
"1E40 004D 006D 004D 006D 004E 006E 004E 006E 004E 006E 004E 006E 004F 006F 004F 006F,",
"1E50 004F 006F 004F 006F 0050 0070 0050 0070 0052 0072 0052 0072 0052 0072 0052 0072,",
"1E60 0053 0073 0053 0073 0053 0073 0053 0073 0053 0073 0054 0074 0054 0074 0054 0074,",
"1E70 0054 0074 0055 0075 0055 0075 0055 0075 0055 0075 0055 0075 0056 0076 0056 0076,",
"1E80 0057 0077 0057 0077 0057 0077 0057 0077 0057 0077 0058 0078 0058 0078 0059 0079,",
"1E90 005A 007A 005A 007A 005A 007A 0068 0074 0077 0079, 1E9B 017F,",
"1EA0 0041 0061 0041 0061 0041 0061 0041 0061 0041 0061 0041 0061 0041 0061 0041 0061,",
"1EB0 0041 0061 0041 0061 0041 0061 0041 0061 0045 0065 0045 0065 0045 0065 0045 0065,",
"1EC0 0045 0065 0045 0065 0045 0065 0045 0065 0049 0069 0049 0069 004F 006F 004F 006F,",
"1ED0 004F 006F 004F 006F 004F 006F 004F 006F 004F 006F 004F 006F 004F 006F 004F 006F,",
"1EE0 004F 006F 004F 006F 0055 0075 0055 0075 0055 0075 0055 0075 0055 0075 0055 0075,",
"1EF0 0055 0075 0059 0079 0059 0079 0059 0079 0059 0079, 1F00-1F07 03B1, 1F08-1F0F 0391, 1F10-1F15 03B5,",
"1F18-1F1D 0395, 1F20-1F27 03B7, 1F28-1F2F 0397, 1F30-1F37 03B9, 1F38-1F3F 0399, 1F40-1F45 03BF,",
"1F48-1F4D 039F, 1F50-1F57 03C5, 1F59 03A5, 1F5B 03A5, 1F5D 03A5, 1F5F 03A5, 1F60-1F67 03C9, 1F68-1F6F 03A9,",
"1F70-1F71 03B1, 1F72-1F73 03B5, 1F74-1F75 03B7, 1F76-1F77 03B9, 1F78-1F79 03BF, 1F7A-1F7B 03C5,",
"1F7C-1F7D 03C9, 1F80-1F87 03B1, 1F88-1F8F 0391, 1F90-1F97 03B7, 1F98-1F9F 0397, 1FA0-1FA7 03C9,",
"1FA8-1FAF 03A9, 1FB0-1FB4 03B1, 1FB6-1FB7 03B1, 1FB8-1FBC 0391, 1FBE 03B9, 1FC1 00A8, 1FC2-1FC4 03B7,",
"1FC6-1FC7 03B7, 1FC8-1FC9 0395, 1FCA-1FCC 0397, 1FCD-1FCF 1FBF, 1FD0-1FD3 03B9, 1FD6-1FD7 03B9,",
"1FD8-1FDB 0399, 1FDD-1FDF 1FFE, 1FE0-1FE3 03C5, 1FE4-1FE5 03C1, 1FE6-1FE7 03C5, 1FE8-1FEB 03A5 03A1,",
"1FED-1FEE 00A8 0060, 1FF2-1FF4 03C9, 1FF6-1FF7 03C9, 1FF8-1FF9 039F, 1FFA-1FFC 03A9 00B4, 2000 2002 2003,",
"2126 03A9, 212A 004B 0041, 219A 2190 2192, 21AE 2194, 21CD 21D0 21D4 21D2, 2204 2203, 2209 2208, 220C 220B,",
"2224 2223, 2226 2225, 2241 223C, 2244 2243, 2247 2245, 2249 2248, 2260 003D, 2262 2261,",
"226D 224D 003C 003E, 2270 2264 2265, 2274 2272 2273, 2278 2276 2277, 2280 227A 227B, 2284 2282 2283,",
"2288 2286 2287, 22AC 22A2 22A8 22A9 22AB, 22E0 227C 227D 2291 2292, 22EA 22B2 22B3 22B4 22B5,",
"2329 3008 3009, 2ADC 2ADD, 304C 304B, 304E 304D, 3050 304F, 3052 3051, 3054 3053, 3056 3055, 3058 3057,",
"305A 3059, 305C 305B, 305E 305D, 3060 305F, 3062 3061, 3065 3064, 3067 3066, 3069 3068, 3070-3071 306F,",
"3073-3074 3072, 3076-3077 3075, 3079-307A 3078, 307C-307D 307B, 3094 3046, 309E 309D, 30AC 30AB, 30AE 30AD,",
"30B0 30AF, 30B2 30B1, 30B4 30B3, 30B6 30B5, 30B8 30B7, 30BA 30B9, 30BC 30BB, 30BE 30BD, 30C0 30BF,",
"30C2 30C1, 30C5 30C4, 30C7 30C6, 30C9 30C8, 30D0-30D1 30CF, 30D3-30D4 30D2, 30D6-30D7 30D5, 30D9-30DA 30D8,",
"30DC-30DD 30DB, 30F4 30A6, 30F7 30EF 30F0 30F1 30F2, 30FE 30FD, F900 8C48 66F4 8ECA 8CC8 6ED1 4E32 53E5,",
"F907-F908 9F9C 5951 91D1 5587 5948 61F6 7669 7F85,",
"F910 863F 87BA 88F8 908F 6A02 6D1B 70D9 73DE 843D 916A 99F1 4E82 5375 6B04 721B 862D,",
"F920 9E1E 5D50 6FEB 85CD 8964 62C9 81D8 881F 5ECA 6717 6D6A 72FC 90CE 4F86 51B7 52DE,",
"F930 64C4 6AD3 7210 76E7 8001 8606 865C 8DEF 9732 9B6F 9DFA 788C 797F 7DA0 83C9 9304,",
"F940 9E7F 8AD6 58DF 5F04 7C60 807E 7262 78CA 8CC2 96F7 58D8 5C62 6A13 6DDA 6F0F 7D2F,",
"F950 7E37 964B 52D2 808B 51DC 51CC 7A1C 7DBE 83F1 9675 8B80 62CF 6A02 8AFE 4E39 5BE7,",
"F960 6012 7387 7570 5317 78FB 4FBF 5FA9 4E0D 6CCC 6578 7D22 53C3 585E 7701 8449 8AAA,",
"F970 6BBA 8FB0 6C88 62FE 82E5 63A0 7565 4EAE 5169 51C9 6881 7CE7 826F 8AD2 91CF 52F5,",
"F980 5442 5973 5EEC 65C5 6FFE 792A 95AD 9A6A 9E97 9ECE 529B 66C6 6B77 8F62 5E74 6190,",
"F990 6200 649A 6F23 7149 7489 79CA 7DF4 806F 8F26 84EE 9023 934A 5217 52A3 54BD 70C8,",
"F9A0 88C2 8AAA 5EC9 5FF5 637B 6BAE 7C3E 7375 4EE4 56F9 5BE7 5DBA 601C 73B2 7469 7F9A,",
"F9B0 8046 9234 96F6 9748 9818 4F8B 79AE 91B4 96B8 60E1 4E86 50DA 5BEE 5C3F 6599 6A02,",
"F9C0 71CE 7642 84FC 907C 9F8D 6688 962E 5289 677B 67F3 6D41 6E9C 7409 7559 786B 7D10,",
"F9D0 985E 516D 622E 9678 502B 5D19 6DEA 8F2A 5F8B 6144 6817 7387 9686 5229 540F 5C65,",
"F9E0 6613 674E 68A8 6CE5 7406 75E2 7F79 88CF 88E1 91CC 96E2 533F 6EBA 541D 71D0 7498,",
"F9F0 85FA 96A3 9C57 9E9F 6797 6DCB 81E8 7ACB 7B20 7C92 72C0 7099 8B58 4EC0 8336 523A,",
"FA00 5207 5EA6 62D3 7CD6 5B85 6D1E 66B4 8F3B 884C 964D 898B 5ED3 5140 55C0, FA10 585A, FA12 6674,",
"FA15 51DE 732A 76CA 793C 795E 7965 798F 9756 7CBE 7FBD, FA20 8612, FA22 8AF8, FA25 9038 90FD,",
"FA2A 98EF 98FC 9928 9DB4 90DE 96B7,",
"FA30 4FAE 50E7 514D 52C9 52E4 5351 559D 5606 5668 5840 58A8 5C64 5C6E 6094 6168 618E,",
"FA40 61F2 654F 65E2 6691 6885 6D77 6E1A 6F22 716E 722B 7422 7891 793E 7949 7948 7950,",
"FA50 7956 795D 798D 798E 7A40 7A81 7BC0 7DF4 7E09 7E41 7F72 8005 81ED, FA5D-FA5E 8279 8457,",
"FA60 8910 8996 8B01 8B39 8CD3 8D08 8FB6 9038 96E3 97FF 983B 6075 242EE 8218,",
"FA70 4E26 51B5 5168 4F80 5145 5180 52C7 52FA 559D 5555 5599 55E2 585A 58B3 5944 5954,",
"FA80 5A62 5B28 5ED2 5ED9 5F69 5FAD 60D8 614E 6108 618E 6160 61F2 6234 63C4 641C 6452,",
"FA90 6556 6674 6717 671B 6756 6B79 6BBA 6D41 6EDB 6ECB 6F22 701E 716E 77A7 7235 72AF,",
"FAA0 732A 7471 7506 753B 761D 761F 76CA 76DB 76F4 774A 7740 78CC 7AB1 7BC0 7C7B 7D5B,",
"FAB0 7DF4 7F3E 8005 8352 83EF 8779 8941 8986 8996 8ABF 8AF8 8ACB 8B01 8AFE 8AED 8B39,",
"FAC0 8B8A 8D08 8F38 9072 9199 9276 967C 96E3 9756 97DB 97FF 980B 983B 9B12 9F9C 2284A,",
"FAD0 22844 233D5 3B9D 4018 4039 25249 25CD0 27ED3 9F43 9F8E, FB1D 05D9, FB1F 05F2, FB2A-FB2D 05E9,",
"FB2E-FB30 05D0 05D1 05D2 05D3 05D4 05D5 05D6, FB38 05D8 05D9 05DA 05DB 05DC, FB3E 05DE, FB40 05E0 05E1,",
"FB43 05E3 05E4, FB46 05E6 05E7 05E8 05E9 05EA 05D5 05D1 05DB 05E4, 1109A 11099, 1109C 1109B, 110AB 110A5,",
"1134B 11347+1133E 11347+11357, 114BB 114B9 114B9+114B0, 114BE 114B9+114BD, 115BA 115B8+115AF 115B9+115AF,",
"1D15E 1D157+1D165 1D158+1D165,",
"1D160 1D158+1D165+1D16E 1D158+1D165+1D16F 1D158+1D165+1D170 1D158+1D165+1D171 1D158+1D165+1D172,",
"1D1BB 1D1B9+1D165 1D1BA+1D165 1D1B9+1D165+1D16E 1D1BA+1D165+1D16E 1D1B9+1D165+1D16F,",
"1D1C0 1D1BA+1D165+1D16F,",
"2F800 4E3D 4E38 4E41 20122 4F60 4FAE 4FBB 5002 507A 5099 50E7 50CF 349E 2063A 514D 5154,",
"2F810 5164 5177 2051C 34B9 5167 518D 2054B 5197 51A4 4ECC 51AC 51B5 291DF 51F5 5203 34DF,",
"2F820 523B 5246 5272 5277 3515 52C7 52C9 52E4 52FA 5305 5306 5317 5349 5351 535A 5373, 2F830 537D,",
"2F831-2F833 537F 20A2C 7070 53CA 53DF 20B63 53EB 53F1 5406 549E 5438 5448 5468,",
"2F840 54A2 54F6 5510 5553 5563, 2F845-2F846 5584 5599 55AB 55B3 55C2 5716 5606 5717 5651 5674,",
"2F850 5207 58EE 57CE 57F4 580D 578B 5832 5831 58AC 214E4 58F2 58F7 5906 591A 5922 5962,",
"2F860 216A8 216EA 59EC 5A1B 5A27 59D8 5A66 36EE 36FC 5B08, 2F86A-2F86B 5B3E 219C8 5BC3 5BD8 5BE7,",
"2F870 5BF3 21B18 5BFF 5C06 5F53 5C22 3781 5C60 5C6E 5CC0 5C8D 21DE4 5D43 21DE6 5D6E 5D6B,",
"2F880 5D7C 5DE1 5DE2 382F 5DFD 5E28 5E3D 5E69 3862 22183 387C 5EB0 5EB3 5EB6 5ECA 2A392, 2F890 5EFE,",
"2F891-2F892 22331 8201, 2F894-2F895 5F22 38C7 232B8 261DA 5F62 5F6B 38E3 5F9A 5FCD 5FD7 5FF9,",
"2F8A0 6081 393A 391C 6094 226D4 60C7 6148 614C 614E 614C 617A 618E 61B2 61A4 61AF 61DE,",
"2F8B0 61F2 61F6 6210 621B 625D 62B1 62D4 6350 22B0C 633D 62FC 6368 6383 63E4 22BF1 6422,",
"2F8C0 63C5 63A9 3A2E 6469 647E 649D 6477 3A6C 654F 656C 2300A 65E3 66F8 6649 3B19 6691,",
"2F8D0 3B08 3AE4 5192 5195 6700 669C 80AD 43D9 6717 671B 6721 675E 6753 233C3 3B49 67FA,",
"2F8E0 6785 6852 6885 2346D 688E 681F 6914 3B9D 6942 69A3 69EA 6AA8 236A3 6ADB 3C18 6B21,",
"2F8F0 238A7 6B54 3C4E 6B72 6B9F 6BBA 6BBB 23A8D 21D0B 23AFA 6C4E 23CBC 6CBF 6CCD 6C67 6D16,",
"2F900 6D3E 6D77 6D41 6D69 6D78 6D85 23D1E 6D34 6E2F 6E6E 3D33 6ECB 6EC7 23ED1 6DF9 6F6E,",
"2F910 23F5E 23F8E 6FC6 7039 701E 701B 3D96 704A 707D 7077 70AD 20525 7145 24263 719C 243AB,",
"2F920 7228 7235 7250 24608 7280 7295 24735 24814 737A 738B 3EAC 73A5, 2F92C-2F92D 3EB8 7447 745C,",
"2F930 7471 7485 74CA 3F1B 7524 24C36 753E 24C92 7570 2219F 7610 24FA1 24FB8 25044 3FFC 4008,",
"2F940 76F4 250F3 250F2 25119 25133 771E, 2F946-2F947 771F 774A 4039 778B 4046 4096 2541D 784E 788C,",
"2F950 78CC 40E3 25626 7956 2569A 256C5 798F 79EB 412F 7A40 7A4A 7A4F 2597C, 2F95D-2F95E 25AA7 7AEE,",
"2F960 4202 25BAB 7BC6 7BC9 4227 25C80 7CD2 42A0 7CE8 7CE3 7D00 25F86 7D63 4301 7DC7 7E02,",
"2F970 7E45 4334 26228 26247 4359 262D9 7F7A 2633E 7F95 7FFA 8005 264DA 26523 8060 265A8 8070,",
"2F980 2335F 43D5 80B2 8103 440B 813E 5AB5 267A7 267B5 23393 2339C 8201 8204 8F9E 446B 8291,",
"2F990 828B 829D 52B3 82B1 82B3 82BD 82E6 26B3C 82E5 831D 8363 83AD 8323 83BD 83E7 8457,",
"2F9A0 8353 83CA 83CC 83DC 26C36 26D6B 26CD5 452B 84F1 84F3 8516 273CA 8564 26F2C 455D 4561,",
"2F9B0 26FB1 270D2 456B 8650 865C 8667 8669 86A9 8688 870E 86E2 8779 8728 876B 8786 45D7,",
"2F9C0 87E1 8801 45F9 8860 8863 27667 88D7 88DE 4635 88FA 34BB 278AE 27966 46BE 46C7 8AA0,",
"2F9D0 8AED 8B8A 8C55 27CA8 8CAB 8CC1 8D1B 8D77 27F2F 20804 8DCB 8DBC 8DF0 208DE 8ED4 8F38,",
"2F9E0 285D2 285ED 9094 90F1 9111 2872E 911B 9238 92D7 92D8 927C 93F9 9415 28BFA 958B 4995,",
"2F9F0 95B7 28D77 49E6 96C3 5DB2 9723 29145 2921A 4A6E 4A76 97E0 2940A 4AB2 29496, 2F9FE-2F9FF 980B,",
"2FA00 9829 295B6 98E2 4B33 9929 99A7 99C2 99FE 4BCE 29B30 9B12 9C40 9CFD 4CCE 4CED 9D67,",
"2FA10 2A0CE 4CF8 2A105 2A20E 2A291 9EBB 4D56 9EF9 9EFE 9F05 9F0F 9F16 9F3B 2A600,",
};
/* to here */

enum { MTT__WORD_CHARACTERS = 100, MTT__WORD_ALPHABET = 1000, MTT__CODE_POINTS = 0x110000 };

typedef struct mtt__wordpiece {
    mtt_wordpiece_options options;
    unsigned char classes[MTT__CODE_POINTS];
    mtt__table letters; /* (MTT__CASE, c): lower case of c; (MTT__BASE + i, c): letter i of its base */
    uint32_t unknown;   /* id of [UNK] */
    size_t longest;     /* bytes of the longest piece */
} mtt__wordpiece;
enum { MTT__CASE, MTT__BASE };

/* ---- the normaliser */

/* Reads a line of the table of `kind`, a class or MTT__CASES or MTT__BASES. */
static mtt_status mtt__words_line(mtt_env *env, mtt__wordpiece *w, int kind, const char *at)
{
    uint32_t first, last, step, part, number, c;
    char *end;
    while (*at) {
        last = first = (uint32_t)strtoul(at, &end, 16);
        if (*end == '-') last = (uint32_t)strtoul(end + 1, &end, 16);
        step = *end == '/' ? 2 : 1;
        at = end + (*end == '/' ? 2 : 0);
        for (c = first; c <= last && kind < MTT__CASES; c += step) w->classes[c] = (unsigned char)kind;
        if (kind < MTT__CASES) continue;
        part = kind == MTT__CASES ? MTT__CASE : MTT__BASE;
        do {
            number = (uint32_t)strtol(at, &end, 16); /* a letter, or a distance modulo 2^32 */
            for (c = first; c <= last; c += step)
                if (mtt__table_put(env, &w->letters, mtt__pair_key(part, c),
                                   kind == MTT__CASES ? c + number : number))
                    return MTT_E_MEMORY;
            part++;
            if (*end == ' ') {
                first = ++last;
                part = MTT__BASE;
            }
            at = end + 1;
        } while (*end != ',');
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
    for (i = 0; i < MTT__LENGTH(mtt__words_bases) && !status; i++)
        status = mtt__words_line(t->env, w, MTT__BASES, mtt__words_bases[i]);
    return status;
}

static void mtt__words_destroy(mtt_tokenizer *t)
{
    mtt__wordpiece *w = (mtt__wordpiece *)t->own;
    mtt__free(t->env, w->letters.cells);
    mtt__free(t->env, w);
}

/* A code point without accents: up to four letters (Unicode's NFD without Mn; Hangul by its formula). */
static int mtt__words_strip(const mtt__wordpiece *w, uint32_t c, uint32_t out[4])
{
    uint32_t hangul = c - 0xac00, letter;
    int n = 0;
    if (w->classes[c] == MTT__MARK) return 0;
    if (c >= 0xac00 && c < 0xd7a4) {
        out[0] = 0x1100 + hangul / 588;
        out[1] = 0x1161 + hangul % 588 / 28;
        out[2] = 0x11a7 + hangul % 28;
        return 2 + (hangul % 28 > 0);
    }
    for (; n < 4; out[n++] = letter) {
        letter = mtt__table_find(&w->letters, mtt__pair_key(MTT__BASE + (uint32_t)n, c))->value;
        if (letter == MTT__NONE) break;
    }
    if (!n) out[n++] = c;
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
    n = o->strip_accents && c >= 0x80 ? mtt__words_strip(s->w, c, letters) : 1;
    for (i = 0; i < n; i++) {
        lower = mtt__table_find(&s->w->letters, mtt__pair_key(MTT__CASE, letters[i]))->value;
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
    if (!piece.size || !mtt__utf8_valid(piece.at, piece.size))
        return *fault = "a piece is empty or not UTF-8", MTT_OK;
    status = mtt__words_add(t, piece.at, piece.size, &index);
    if (!status && (id != index || id + 1 != t->pieces.count))
        *fault = "a piece occurs twice, or its id is not the next";
    return status;
}

/* A vocab.txt: a piece a line, whose id is the number of the line from 0. Blanks at the end of a line, such
   as that of a Windows line end, do not count. */
static mtt_status mtt__words_load_list(mtt_tokenizer *t, mtt__vocab_file *f)
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
    return mtt__fail(t->env, MTT_E_FORMAT, "%s:%u: %s: download the vocab.txt of a BERT model again", f->path,
                     (unsigned)line, fault);
}

static mtt_status mtt__words_load(mtt_tokenizer *t, mtt__vocab_file *f)
{
    static const mtt__vocab_rule rules[] = {
        {"version", "\"1.0\""},
        {"truncation", "null|missing"},
        {"padding", "null|missing"},
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
    mtt__vocab_token token;
    mtt_slice text;
    uint64_t id;
    int added = 0;
    if (!f->key_count) return mtt__words_load_list(t, f);
    status = mtt__vocab_check(f, rules, MTT__LENGTH(rules));
    if (status) return status;
    o->lowercase = mtt_slice_is(mtt__vocab_value(f, "normalizer.lowercase"), "true");
    o->keep_controls = mtt_slice_is(mtt__vocab_value(f, "normalizer.clean_text"), "false");
    o->keep_cjk = mtt_slice_is(mtt__vocab_value(f, "normalizer.handle_chinese_chars"), "false");
    text = mtt__vocab_value(f, "normalizer.strip_accents");
    o->strip_accents = mtt_slice_is(text, "true") || (o->lowercase && mtt_slice_is(text, "null"));
    j->at = mtt__vocab_value(f, "added_tokens").at;
    for (mtt_json_begin(j, '['); mtt_json_item(j) && mtt__vocab_added(j, &token); added = 1)
        if (!token.special) mtt__json_fail(j, "an added token must be special");
    if (!added) mtt__json_fail(j, "no added token");
    if (j->fault) return mtt__vocab_fail(f, NULL);
    j->at = mtt__vocab_value(f, "model.vocab").at;
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
    return kind;
}

#endif /* MTT_WORDPIECE_DONE */
#endif /* MTT_IMPLEMENTATION */
