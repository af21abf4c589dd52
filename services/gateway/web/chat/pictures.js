// Pictures on their way into a question: read, measured, and written as data URLs when they are sent.
//
// A picture is { blob, name, width, height }: plain data that the browser's database can keep.

const dataUrls = new WeakMap(); // blob -> promise of its data URL: a conversation sends its pictures with every turn

// How the files begin that the server takes: a browser reads others, too, which would be refused only once they are sent.
const FORMATS = {
  JPEG: /^\xff\xd8\xff/,
  PNG: /^\x89PNG\r\n\x1a\n/,
  WebP: /^RIFF[^]{4}WEBP/,
  GIF: /^GIF8[79]a/,
  BMP: /^BM/,
};
const HEADER_BYTES = 12;

/** Throws an Error in words if the server does not take the file's format, or the browser cannot read it. */
export async function readPicture(blob, name = blob.name) {
  const file = name || "The file";
  const unreadable = () => { throw new Error(`${file} cannot be read as a picture.`); };
  if (!(await isSupported(blob).catch(unreadable))) {
    throw new Error(`${file} is not a supported image; supported formats: ${Object.keys(FORMATS).join(", ")}.`);
  }
  const bitmap = await createImageBitmap(blob).catch(unreadable); // upright, as the server's: a camera's note is applied
  const { width, height } = bitmap;
  bitmap.close();
  return { blob, name: name || "picture", width, height };
}

async function isSupported(blob) {
  const header = new Uint8Array(await blob.slice(0, HEADER_BYTES).arrayBuffer());
  return Object.values(FORMATS).some((beginning) => beginning.test(String.fromCharCode(...header)));
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
