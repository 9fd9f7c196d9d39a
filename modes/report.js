// The values of a figure at a step, by pointer or arrow keys, and filters of the predictions.
// Without this script the page shows the same curves, the last values and all predictions.
'use strict';

for (const figure of document.querySelectorAll('figure')) {
  const output = figure.querySelector('output');
  const lastValues = [...output.childNodes];
  const linear = figure.querySelector('svg.linear');
  const curves = [...linear.querySelectorAll('path.curve:not(.dashed)')].map((path) => ({
    name: path.dataset.name,
    steps: path.dataset.steps.split(' ').map(Number),
    values: path.dataset.values.split(' ').map(Number),
  }));
  for (const svg of figure.querySelectorAll('svg')) {
    followPointer(svg, curves, output, lastValues);
  }
}

function followPointer(svg, curves, output, lastValues) {
  const paths = [...svg.querySelectorAll('path.curve:not(.dashed)')];
  const places = paths.map((path) =>
    [...path.getAttribute('d').matchAll(/[ML]([-\d.]+) ([-\d.]+)/g)].map((match) => ({
      x: Number(match[1]),
      y: Number(match[2]),
    })),
  );
  const cursor = svg.appendChild(make('path', 'cursor'));
  const marks = paths.map((path) => svg.appendChild(make('circle', `mark ${path.classList[1]}`)));
  let shownX = null;

  function visible() {
    return [...paths.keys()].filter((i) => getComputedStyle(paths[i]).display !== 'none');
  }

  // Show the values of all curves at the step that is nearest to x, in units of the figure.
  function show(x) {
    const all = visible();
    if (!all.length) return;
    const nearest = all.map((i) => nearestTo(places[i], x));
    const distances = all.map((i, k) => Math.abs(places[i][nearest[k]].x - x));
    const leader = distances.indexOf(Math.min(...distances));
    shownX = places[all[leader]][nearest[leader]].x;
    const step = curves[all[leader]].steps[nearest[leader]];
    cursor.setAttribute('d', `M${shownX} 8L${shownX} 194`);
    const texts = [span('', `step ${step.toLocaleString('en')}`)];
    marks.forEach((mark) => mark.setAttribute('r', 0));
    for (const i of all) {
      const at = nearestTo(places[i], shownX);
      const ownStep = curves[i].steps[at];
      const ofStep = ownStep === step ? '' : ` at ${ownStep.toLocaleString('en')}`;
      const value = format(curves[i].values[at]);
      texts.push(span(paths[i].classList[1], `${curves[i].name} ${value}${ofStep}`));
      marks[i].setAttribute('cx', places[i][at].x);
      marks[i].setAttribute('cy', places[i][at].y);
      marks[i].setAttribute('r', 3.5);
    }
    output.replaceChildren(...texts);
  }

  function leave() {
    shownX = null;
    cursor.removeAttribute('d');
    marks.forEach((mark) => mark.setAttribute('r', 0));
    output.replaceChildren(...lastValues);
  }

  svg.addEventListener('pointermove', (event) => {
    const box = svg.getBoundingClientRect();
    show(((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width);
  });
  svg.addEventListener('pointerleave', leave);
  svg.addEventListener('blur', leave);
  svg.addEventListener('keydown', (event) => {
    const xs = visible().flatMap((i) => places[i].map((place) => place.x));
    const before = shownX === null ? xs : xs.filter((x) => x < shownX);
    const after = shownX === null ? xs : xs.filter((x) => x > shownX);
    const targets = {
      ArrowLeft: Math.max(...before),
      ArrowRight: Math.min(...after),
      Home: Math.min(...xs),
      End: Math.max(...xs),
    };
    if (event.key === 'Escape') leave();
    if (!(event.key in targets)) return;
    event.preventDefault();
    if (Number.isFinite(targets[event.key])) show(targets[event.key]);
  });
}

// Four digits, as chart.format_value writes them.
function format(value) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString('en');
  return String(Number(value.toPrecision(4)));
}

function nearestTo(places, x) {
  let best = 0;
  for (let i = 1; i < places.length; i++) {
    if (Math.abs(places[i].x - x) < Math.abs(places[best].x - x)) best = i;
  }
  return best;
}

function make(tag, cssClass) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  element.setAttribute('class', cssClass);
  if (tag === 'circle') element.setAttribute('r', 0);
  return element;
}

function span(cssClass, text) {
  const element = document.createElement('span');
  element.className = cssClass;
  element.textContent = text;
  return element;
}

for (const task of document.querySelectorAll('details.task')) {
  const form = task.querySelector('form');
  const search = form.querySelector('input[type=search]');
  const onlyOthers = form.querySelector('input[type=checkbox]');
  const examples = [...task.querySelectorAll('article')];
  const filter = () => {
    const words = search.value.toLowerCase();
    let count = 0;
    for (const example of examples) {
      const fits = example.textContent.toLowerCase().includes(words);
      example.hidden = !fits || (onlyOthers.checked && !('differs' in example.dataset));
      count += !example.hidden;
    }
    form.querySelector('output').textContent = `${count} shown`;
  };
  form.addEventListener('input', filter);
  form.addEventListener('submit', (event) => event.preventDefault());
  form.hidden = false;
}
