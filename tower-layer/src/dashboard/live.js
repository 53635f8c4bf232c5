// Shows each change of the table. The server has escaped what is in it.
const live = document.getElementById('live');
const stale = document.getElementById('stale');
let stream = null;
let late = 0;
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

const isLive = yes => {
  clearTimeout(late);
  late = 0;
  stale.hidden = yes;
};

const open = () => {
  let shown = null;
  stream = new EventSource(location.href);
  stream.onopen = () => isLive(true);
  stream.onmessage = event => {
    if (event.data === shown) return;
    shown = next = event.data;
    show();
  };
  // A stream also ends when all is well, and the browser opens the next one after a second.
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED) isLive(false);
    else late ||= setTimeout(() => isLive(false), 5000);
  };
};

document.addEventListener('selectionchange', show);
// A page that nobody sees asks for nothing.
document.addEventListener('visibilitychange', () => {
  stream?.close();
  clearTimeout(late);
  late = 0;
  if (!document.hidden) open();
});
if (!document.hidden) open();
