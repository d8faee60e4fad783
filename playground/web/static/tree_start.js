// Puts the editor on the page and opens what a link carries. Needs tree_editor.js.
const editor = new TreeEditor(element.querySelector(".editor"));
let openedRev = null;

// A link has the leaves in short, or the tree in any format that import reads.
async function openTree(link) {
  if (!link?.tree) return;
  const short = fromLink(link.tree);
  const answer = short ? null : await server.read({ text: link.tree });
  if (short || answer?.tree) editor.open(short ?? Choices.closed(answer.tree), "Opened the link's tree");
  else editor.complain(`The link's tree cannot be read. ${answer?.error ?? "Ask for the link again."}`);
}

async function openLink() {
  const { rev = null, link = null } = props.value ?? {};
  if (rev === openedRev || !editor.pickers.menus.targets.length) return;
  openedRev = rev;
  if (!link) return;
  await editor.pickers.during(() => openAt(link));
}

async function openAt(link) {
  await editor.pickers.pickTarget(link.target || editor.pickers.target, link.method || undefined,
    sourceOf(link));
  await openTree(link);
}

async function startEditor() {
  const menus = await server.start({});
  if (!menus || menus.error) {
    editor.complain(menus?.error ?? "The server did not answer. Reload the page.");
    return;
  }
  plotlyAddress = menus.plotly;
  const { rev = null, link = null } = props.value ?? {};
  openedRev = rev;
  editor.files.fill(menus);
  await editor.pickers.fill(menus, link);
  await openTree(link);
  await openLink();
}

watch("value", openLink);
editor.pickers.during(startEditor);
