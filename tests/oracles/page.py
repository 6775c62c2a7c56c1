"""page.py numbers PAGE INDEX JSON [LISTING] - compares plan INDEX of a page of `schedule --html` with
`schedule --json` and with the listing, and checks that the page's tensors explain the plan's bytes.
page.py drive PAGE - prints the page with a script that presses keys and moves the pointer, and that writes
`ok: ` or `not ok: ` and the name of each step into the page.
page.py plan PAGE - the same for the page that plans by itself: the script fills in its controls.
page.py links PAGE - the same, of links that want a shell command into what Copy copies: `copied: ` and that.
page.py begin PAGE WORD... - the same: the page begins with these words in its command; ~ is a blank."""
import json
import re
import sys

SLOT = 256


def plans_of(path):
    data = r"<script type='application/json' id='plans'>\n(.*?)</script>"
    return json.loads(re.search(data, open(path, encoding="ascii").read(), re.S)[1])


def same(name, one, other):
    assert one == other, f"{name}: {one} is not {other}"


def slot(tensor):
    return -(-tensor["bytes"] // SLOT) * SLOT


def compare_timeline(plan, truth):
    same("plan", plan["plan"], truth["plan"])
    same("operations", len(plan["ops"]), len(truth["timeline"]))
    peak = max(op["live_bytes"] for op in plan["ops"])
    same("bytes of the peak", plan["ops"][plan["plan"]["peak_op"]]["live_bytes"], peak)
    for i, (op, line) in enumerate(zip(plan["ops"], truth["timeline"])):
        bytes_of = dict(zip(plan["categories"], op["bytes"]))
        same(f"operation {i}", {k: op[k] for k in line if k != "bytes"} | {"bytes": bytes_of}, line)


def check_tensors(plan):
    """The slots that live during an operation add up to its bytes, and share no byte of the arena."""
    for i, op in enumerate(plan["ops"]):
        alive = [t for t in plan["tensors"] if t["first"] <= i <= t["last"]]
        sums = [0] * len(plan["categories"])
        end = 0
        for t in sorted(alive, key=lambda t: t["offset"]):
            sums[t["category"]] += slot(t)
            assert t["offset"] >= end, f"operation {i}: {t['name']} overlaps the tensor below it"
            end = t["offset"] + slot(t)
        same(f"bytes of the tensors in operation {i}", sums, op["bytes"])
        assert end <= plan["plan"]["arena_bytes"], f"operation {i}: {end} is outside the arena"
        used = {k for role in ("reads", "writes", "scratch") for k in op[role]}
        ends = {k for k, t in enumerate(plan["tensors"]) if t["last"] == i and not t["state"]}
        assert ends <= used, f"operation {i}: a tensor ends that it does not use"
    ids = next(t["bytes"] for t in plan["tensors"] if t["name"] == "tokens") // 4
    same("tokens of a step", ids * plan["plan"]["micro_batches"], plan["batch"] * plan["seq_len"])
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I32": 4, "U8": 1}
    for t in plan["tensors"]:
        elements = 1
        for n in t["shape"]: elements *= n
        same(f"bytes of {t['name']}", t["bytes"], elements * sizes[t["type"]])


def compare_listing(plan, path):
    """The operands of each line, and what it frees, are the page's."""
    small = {"control", "counters", "ranges"}
    lines = open(path, encoding="utf-8").read().splitlines()[:len(plan["ops"])]
    for i, (op, line) in enumerate(zip(plan["ops"], lines)):
        name, rest = re.match(r" *%d \S+ +(?:again +)?[\d.]+ MiB  (\S+) +(.*)" % i, line).groups()
        reads, writes, freed = re.match(r"(.*?) ?-> ?(.*?) ?(?: ?frees (.*))?$", rest).groups()
        names = lambda role: [plan["tensors"][k]["name"] for k in op[role]]
        same(f"line {i}", name, op["op"])
        if "gradients" in reads:
            kinds = [plan["categories"][plan["tensors"][k]["category"]] for k in op["reads"]]
            same(f"gradients of line {i}", int(reads.split()[-2]), kinds.count("gradients"))
        else:
            same(f"inputs of line {i}", reads.split(), [n for n in names("reads") if n not in small])
            same(f"outputs of line {i}", writes.split(), [n for n in names("writes") if n not in small])
        ends = [t["name"] for t in plan["tensors"] if t["last"] == i and not t["state"]]
        freed = (freed or "").split()
        if freed[1:] == ["gradients"]: same(f"freed in line {i}", int(freed[0]), len(ends))
        else: same(f"freed in line {i}", sorted(freed), sorted(ends))
    same("lines", len(lines), len(plan["ops"]))


DRIVER = """<script>
{
  const log = document.body.appendChild(document.createElement('pre'));
  const say = (good, name) => log.append(`${good ? 'ok' : 'not ok'}: ${name}\\n`);
  const plans = views.map(view => view.plan);
  const boxes = [...document.querySelectorAll('[role=slider]')];
  const at = k => Number(boxes[k].getAttribute('aria-valuenow'));
  const last = k => Number(boxes[k].getAttribute('aria-valuemax'));
  const press = (key, k = 0) => boxes[k].dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
  const picked = k => boxes[k].parentElement.querySelectorAll('tr.on');
  const move = (type, target, x, y) => {
    const box = target.getBoundingClientRect();
    target.dispatchEvent(new PointerEvent(type, {bubbles: true, clientX: box.left + x * box.width,
      clientY: box.top + y * box.height}));
  };
  log.append('\\n');
  say(boxes.length === 2, 'two plans');
  say(boxes.every(b => b.tabIndex === 0 && b.getAttribute('aria-label')), 'the figures take the focus');
  say(boxes.every((b, k) => at(k) === plans[k].plan.peak_op), 'each plan begins at its peak');
  press('Home');
  say(at(0) === 0 && at(1) === 0, 'Home, and the other plan follows');
  press('ArrowRight'); press('ArrowRight'); press('ArrowLeft');
  say(at(0) === 1 && at(1) === 1, 'arrows');
  press('PageDown');
  say(at(0) === 11, 'PageDown');
  press('PageUp');
  say(at(0) === 1, 'PageUp');
  press('PageUp');
  say(at(0) === 0, 'the first operation is the first');
  press('End', 1);
  say(at(1) === last(1) && at(0) === last(0), 'End');
  press('ArrowRight', 1);
  say(at(1) === last(1), 'the last operation is the last');
  press('p', 1);
  say(at(1) === plans[1].plan.peak_op, 'P');
  const again = plans[1].ops.findIndex(op => op.recomputed);
  press('Home', 1);
  for (let i = 0; i < again; i++) press('ArrowRight', 1);
  say(at(1) === again && boxes[1].getAttribute('aria-valuetext').includes('recomputed'), 'again, in words');
  say(boxes[1].parentElement.querySelector('mark') !== null, 'recomputed, in the heading');
  say(boxes[1].querySelectorAll('.strip .again').length > 0 && !boxes[0].querySelector('.strip .again'),
    'recomputed operations have marks');
  press('ArrowDown', 1);
  say(picked(1).length === 1 && Number(boxes[1].querySelector('.picked').getAttribute('width')) > 0,
    'ArrowDown marks a tensor in the table and the map');
  let wrong = 0;
  press('Home', 1);
  for (let i = 0; i < plans[1].ops.length; i++, press('ArrowRight', 1)) {
    const alive = plans[1].tensors.filter(t => t.first <= i && i <= t.last);
    wrong += boxes[1].parentElement.querySelectorAll('tbody tr').length !== alive.length;
  }
  say(wrong === 0, 'a row for each tensor in memory, in every operation');
  const [memory, map] = boxes[0].querySelectorAll('.chart');
  move('pointermove', memory, .5, .5);
  say(at(0) === Math.floor(plans[0].ops.length / 2), 'the pointer moves');
  const middle = at(0);
  const missed = plans[0].tensors.filter(t => t.first <= middle && middle <= t.last).filter(t => {
    move('pointermove', map, .5, 1 - (t.offset + t.bytes / 2) / highest);
    return !picked(0)[0].textContent.includes(t.name);
  });
  say(missed.length === 0, 'the pointer marks the tensor below it');
  move('pointermove', map, .5, .01);
  say(picked(0).length === 0, 'and nothing where there is none');
  move('click', memory, .5, .5); move('pointermove', memory, .1, .5);
  say(at(0) === Math.floor(plans[0].ops.length / 2), 'a click holds');
  move('click', memory, .1, .5);
  say(at(0) === Math.floor(plans[0].ops.length / 10), 'another releases');
  const wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
  say(wide, 'nothing is wider than the window');
  say(true, 'the end');
}
</script>
"""


PLANNER = """<script>
{
  const log = document.body.appendChild(document.createElement('pre'));
  const say = (good, name) => log.append(`${good ? 'ok' : 'not ok'}: ${name}\\n`);
  const set = (name, value) => {
    fields[name].value = value;
    fields[name].dispatchEvent(new InputEvent('input', {bubbles: true}));
  };
  const text = id => document.getElementById(id).textContent;
  const arenas = () => views.map(view => view.plan.plan.arena_bytes);
  const wait = ms => new Promise(done => setTimeout(done, ms));
  log.append('\\n');
  (async () => {
    say(views.length === 2 && text('message') === '', 'two plans without a message');
    say(views[0].plan.technique === 'bf16_flash' && fields.layers.value === '3', 'it begins as it was told');
    say(text('command').includes('--layers 3') && text('command').includes('--technique bf16_flash'),
      'the command trains the first');
    say([...document.querySelectorAll('input, select')].every(e => e.labels.length || e.ariaLabel),
      'each control has a label');
    const before = arenas();
    set('seq-len', 16);
    say(arenas()[0] < before[0] && arenas()[1] < before[1], 'shorter sequences take less, in both plans');
    say(['seq-len=16', 'compare='].every(part => location.hash.includes(part)), 'the link has what changed');
    set('technique', 'bf61');
    say(text('message').includes('bf61') && views.length === 2, 'a wrong technique is named, the plans stay');
    set('technique', 'bf16_flash_chunked');
    say(text('message') === '' && views[0].plan.technique === 'bf16_flash_chunked', 'a right one is drawn');
    set('more', '--norm rms --mlp swiglu');
    say(text('message') === '' && text('command').endsWith('--norm rms --mlp swiglu'), 'further options');
    set('more', '');
    set('compare', '');
    say(views.length === 1, 'one plan');
    set('model', 'gpt2');
    say(fields['d-model'].value === '768' && fields.layers.disabled, 'a published model has its sizes');
    say(fields['seq-len'].value === '1024' && location.hash.includes('model=gpt2'), 'and its length');
    set('batch-size', 16);
    set('gpu', 'T4, 15 GiB');
    await wait(500);
    say(text('message') === 'T4 has no BF16: take fp16_flash_chunked' && text('command') === '' &&
      text('fits') === 'bf16_flash_chunked: T4 has no BF16: take fp16_flash_chunked.' &&
      document.getElementById('copy').disabled, 'what a GPU cannot compute is said, and is no command');
    for (const [gpu, technique, says] of [
      ['T4, 15 GiB', 'tf32', 'T4 has no TF32: take fp32'],
      ['T4, 15 GiB', 'fp8_flash', 'T4 has no FP8: take fp16_flash'],
      ['T4, 15 GiB', 'bf16_early', 'T4 has no BF16: take fp32_early'],
      ['T4, 15 GiB', 'fp32', ''],
      ['RTX 3090, 24 GB', 'bf16', ''],
      ['A100, 40 GB', 'fp8_flash_window64', 'A100 has no FP8: take bf16_flash_window64'],
      ['A100, 80 GB', 'bf16_flash', ''],
      ['L4, 23 GB', 'fp8_layers8', ''],
      ['H100, 80 GB', 'fp8_flash', '']]) {
      set('gpu', gpu);
      set('technique', technique);
      if (technique.includes('early')) set('more', '--clip -1'), set('more', '');
      say(text('message') === says && (text('command') === '') === (says !== ''), `${technique} on ${gpu}`);
    }
    set('compare', 'fp8_flash');
    set('gpu', 'A100, 40 GB');
    set('technique', 'bf16_flash');
    await wait(500);
    say(text('message') === 'A100 has no FP8: take bf16_flash' && text('command') !== '' &&
      /^bf16_flash: at most \\d+ sequences of 1024 tokens fit .* fp8_flash: A100 has no FP8/.test(text('fits')),
      'the technique beside it, too');
    set('compare', '');
    set('technique', 'fp16_flash_chunked');
    set('gpu', 'T4, 15 GiB');
    await wait(500);
    say(text('command').startsWith('build/train_cuda --data my_text.txt --model gpt2 ') &&
      text('build') === 'make build/train_cuda', 'a GPU has a program of its own');
    say(fields.device.value === 'cuda' && document.querySelector('.limit'), 'a GPU is a line');
    const most = Number(text('fits').match(/at most (\\d+) sequences of 1024/)[1]);
    const room = (15360 - 1024) * 2 ** 20;
    set('batch-size', most);
    say(arenas()[0] <= room, 'the largest batch fits');
    set('batch-size', most + 1);
    say(arenas()[0] > room, 'one more does not');
    set('device', 'cpu');
    say(fields.gpu.value === '' && text('command').startsWith('build/train --data') &&
      text('build') === 'make train', 'a CPU has no memory of a GPU');
    for (const [name, value, says] of [
      ['seq-len', '', 'Tokens in each: 1 or more'], ['batch-size', '1.5', 'Sequences: "1.5" is not 1 or more'],
      ['ranks', '513', 'Ranks: "513" is not 1 to 512'],
      ['technique', 'flash attention', 'Technique: join the words of "flash attention" by _'],
      ['compare', 'bf16 flash', 'Beside it: join the words of "bf16 flash" by _']]) {
      const before = fields[name].value;
      set(name, value);
      say(text('message') === says && text('command') === '', `${says}, not ${text('message')}`);
      set(name, before);
    }
    set('model', '');
    set('layers', '');
    say(text('message') === 'Layers: 1 to 1024', 'an empty field is named');
    set('layers', 3);
    set('d-model', 12);
    say(text('message') === 'Width: "12" is not 8 or more, a multiple of 8', 'so is a wrong one');
    set('d-model', 768);
    for (const gpu of Object.keys(gpus)) {
      location.hash = `#model=gpt2&B=1&gpu=${encodeURIComponent(gpu)}&technique=fp8_flash`;
      await wait(100);
      const works = gpus[gpu][1] >= 89;
      say(fields.device.value === 'cuda' && views[0].plan.seq_len === 1024 &&
        text('message').includes('no FP8') === !works, `a link with ${gpu}`);
    }
    location.hash = '#layers=5&T=64&B=16&technique=fp32_checkpointing';
    await wait(100);
    say(views[0].plan.seq_len === 64 && views[0].plan.ops.some(op => op.recomputed), 'a link opens its plan');
    document.getElementById('passes').open = true;
    await wait(100);
    passField.value = names.passes.indexOf('adjoints');
    passField.onchange();
    const rows = [...document.querySelectorAll('.sides tbody tr')];
    say(rows.length > 20 && rows.filter(row => row.children[0].textContent === '').length > 10,
      'the adjoints add operations');
    const [field] = document.querySelectorAll('#questions input'), form = field.form;
    const says = form.querySelector('output');
    say(document.querySelectorAll('#questions li').length === 10, 'ten questions');
    const answer = value => { field.value = value; form.requestSubmit(); return says.textContent; };
    say(answer(27).includes('less') && answer(25).includes('more'), 'wrong answers are judged');
    say(answer(26).startsWith('Right'), 'the right one is explained');
    form.querySelector('[type=button]').click();
    await wait(100);
    say(views[0].plan.plan.peak_op === 26, 'the plan of a question opens');
    say(svgFile(views[0].plan).startsWith('<svg') &&
      csv(views[0].plan).split('\\n').length === views[0].plan.ops.length + 2, 'files: SVG and CSV');
    say(document.documentElement.scrollWidth <= document.documentElement.clientWidth, 'not too wide');
    say(performance.getEntriesByType('resource').length === 0, 'nothing was requested');
    say(true, 'the end');
  })();
}
</script>
"""


LINKS = """<script>
{
  const log = document.body.appendChild(document.createElement('pre'));
  const text = id => document.getElementById(id).textContent;
  const wait = ms => new Promise(done => setTimeout(done, ms));
  const evil = [';id', '$(id)', '`id`', '|id', '&id&', '>evil', '~/x', '{id,x}', "'id'", '"id"', '%00;id',
    '%0Aid', '%09id', '%1B[2K', '%E2%80%A8id', '%C2%A0id', '#id', '!id', '=id', '\\\\id', '?', '[a-z]', '*;id'];
  const places = ['more=--lora-targets%20W', 'more=--lora-rank%208%20--lora-targets%20W', 'more=--freeze%20W',
    'more=--freeze%20W%20--freeze%20h.*', 'more=--preset%20W%20--preset%20tiny', 'more=--preset%20W',
    'more=--model%20W%20--model%20gpt2', 'more=--technique%20W%20--technique%20bf16', 'more=W', 'more=--W',
    'more=--norm%20W%20--norm%20rms', 'technique=W', 'technique=bf16%20W', 'technique=bf16%20--lora-targets%20W',
    'compare=W', 'compare=bf16%20--freeze%20W', 'model=W', 'device=W', 'gpu=W', 'layers=W', 'layers=2%20W', 'B=W',
    'T=8%20--freeze%20W', 'V=W', 'ranks=2W', 'heads=1e0W', 'C=64%20--freeze%20W', 'W=W', '__proto__=W'];
  const patterns = ['more=--freeze%20h.*', 'more=--freeze%20wte.*,h.0.*', 'more=--freeze=*.bias',
    'more=--lora-rank%208%20--lora-targets%20*&device=cuda', 'more=--norm%20rms'];
  let copied = '';
  Object.defineProperty(navigator, 'clipboard', {value: {writeText: words => copied = words}});
  const follow = async link => {
    copied = '';
    location.hash = '#' + link;
    await wait(1);
    document.getElementById('copy').click();
    return copied;
  };
  log.append('\\n');
  (async () => {
    let count = 0, offered = 0;
    for (const place of places)
      for (const word of evil) {
        const line = await follow(place.replaceAll('W', word.replace(/[&#;$`|>{}"'?]/g, encodeURIComponent)));
        const safe = /^$|^build\\/train(_cuda)? --data my_text\\.txt( [\\w.,+:\\/=-]+| '[\\w.,*+:\\/=-]+')+$/.test(line);
        if (!safe || /\\bid\\b|evil/.test(line)) log.append(`not ok: ${place} with ${word}: ${line}\\n`);
        if (!line && !text('message')) log.append(`not ok: ${place} with ${word}: no word why\\n`);
        log.append(line && `copied: ${line}\\n`);
        count++;
        offered += line !== '';
      }
    log.append(`${count > 600 ? 'ok' : 'not ok'}: ${count} links, ${offered} with a command\\n`);
    for (const link of patterns) log.append(`copied: ${await follow(link)}\\n`);
    log.append('ok: the end\\n');
  })();
}
</script>
"""


BEGIN = """<script>
{
  const log = document.body.appendChild(document.createElement('pre'));
  const command = document.getElementById('command').textContent, message = document.getElementById('message');
  log.append('\\n', ...WORDS.map(word => `${command.includes(word) ? 'ok' : 'not ok'}: ${word.slice(0, 60)}\\n`));
  log.append(`${message.textContent === '' ? 'ok' : 'not ok'}: no message: ${message.textContent}\\n`);
  log.append(`${PLAN === views[0].plan.plan.arena_bytes ? 'ok' : 'not ok'}: the arena\\n`, 'ok: the end\\n');
}
</script>
"""


def main():
    if sys.argv[1] in ("drive", "plan", "links", "begin"):
        page = open(sys.argv[2], encoding="ascii").read()
        script = {"drive": DRIVER, "plan": PLANNER, "links": LINKS, "begin": BEGIN}[sys.argv[1]]
        if sys.argv[1] == "begin":
            script = script.replace("WORDS", json.dumps([word.replace("~", " ") for word in sys.argv[3:]])).replace(
                "PLAN", str(plans_of(sys.argv[2])[0]["plan"]["arena_bytes"]))
        sys.stdout.write(page + script)
        return
    plan = plans_of(sys.argv[2])[int(sys.argv[3])]
    compare_timeline(plan, json.load(open(sys.argv[4], encoding="utf-8")))
    check_tensors(plan)
    if len(sys.argv) > 5: compare_listing(plan, sys.argv[5])


try:
    main()
except AssertionError as e:
    sys.exit(str(e))
