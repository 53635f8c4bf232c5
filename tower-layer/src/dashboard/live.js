// Shows each change of the table. The server has escaped what is in it.
const live = document.getElementById('live');
const stale = document.getElementById('stale');
let stream = null;
let late = 0;
let seen = Date.now();
let next = null;

// A selection is not taken away from somebody who copies a name.
const selects = () => {
  const selection = document.getSelection();
  return !selection.isCollapsed && live.contains(selection.anchorNode);
};

const show = () => {
  if (next === null || selects()) return;
  const focused = live.contains(document.activeElement) ? document.activeElement.getAttribute('href') : null;
  live.innerHTML = next;
  next = null;
  if (focused) [...live.querySelectorAll('a')].find(link => link.getAttribute('href') === focused)?.focus();
};

const isNotLive = why => {
  stale.textContent = `Not live: ${why}`;
  stale.hidden = false;
};

const isGone = () => isNotLive('the server does not answer. Load the page again.');

const isThere = () => {
  clearTimeout(late);
  late = 0;
};

const open = () => {
  let shown = null;
  stream = new EventSource(location.href);
  stream.onopen = isThere;
  // Each stream begins with the table, or ends with the event that there was no look at the store.
  stream.onmessage = event => {
    seen = Date.now();
    stale.hidden = true;
    if (event.data === shown) return;
    shown = next = event.data;
    show();
  };
  stream.addEventListener('late', () => {
    const age = Math.round((Date.now() - seen) / 1000);
    isNotLive(`the store was not read in time. The table is ${age} s old.`);
  });
  // A stream also ends when all is well, and the browser opens the next one after a second.
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED) isGone();
    else late ||= setTimeout(isGone, 5000);
  };
};

document.addEventListener('selectionchange', show);
// A page that nobody sees asks for nothing.
document.addEventListener('visibilitychange', () => {
  stream?.close();
  isThere();
  if (!document.hidden) open();
});
if (!document.hidden) open();
