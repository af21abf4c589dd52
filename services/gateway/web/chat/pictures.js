// Pictures on their way into a question: read, measured, and written as data URLs when they are sent.
//
// A picture is { blob, name, width, height }: plain data that the browser's database can keep.

const dataUrls = new WeakMap(); // blob -> promise of its data URL: a conversation sends its pictures with every turn

/** Throws an Error in words if the browser cannot read the file as a picture. */
export async function readPicture(blob, name = blob.name) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob); // upright: the server, too, applies the orientation that a camera noted
  } catch {
    throw new Error(`${name || "The file"} cannot be read as a picture.`);
  }
  const { width, height } = bitmap;
  bitmap.close();
  return { blob, name: name || "picture", width, height };
}

export function dataUrl({ blob }) {
  if (!dataUrls.has(blob)) {
    dataUrls.set(blob, new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(blob);
    }));
  }
  return dataUrls.get(blob);
}

/** An <img> of it; its memory is given back when it has been drawn. */
export function pictureElement(picture) {
  const image = new Image();
  image.alt = `${picture.name}, ${picture.width} × ${picture.height} pixels`;
  image.width = picture.width;
  image.height = picture.height;
  const url = URL.createObjectURL(picture.blob);
  image.onload = image.onerror = () => URL.revokeObjectURL(url);
  image.src = url;
  return image;
}

/** Files of a drop or paste that call themselves pictures. */
export const picturesIn = (transfer) => [...transfer.files].filter((file) => file.type.startsWith("image/"));
